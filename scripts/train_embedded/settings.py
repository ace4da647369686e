"""Sizes of the model, the stages of its training and the weights of its loss."""

EOS = "<|endoftext|>"
VOCAB = 1024
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 8, 192, 512, 4, 2, 64
POSITIONS = 4608
ROPE_THETA = 100_000.0
# Divisible by every length, so that the compiled code sees one shape.
BATCH_TOKENS = 147_456
# (share of the training time at which the stage ends, sequence length)
STAGES = ((0.22, 512), (0.37, 1024), (0.60, 2048), (1.0, POSITIONS))
# Loss weights in tenths: random digits of a fact cannot be predicted, answers are the point.
W_STORY, W_FACT, W_QUESTION, W_ANSWER = 10, 2, 2, 40
