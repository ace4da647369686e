"""What decode and prefill share of attention: scores, masks, softmax."""
