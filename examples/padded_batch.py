"""A batch of prompts of different lengths, padded on the left.

python examples/padded_batch.py MODEL
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(name).to("cuda" if torch.cuda.is_available() else "cpu")
tq_cache.enable(model)

story = Path(__file__).with_name("story.txt").read_text()
stories = [(story, "Frank"), (story, "Lily"), (story[: len(story) // 2], "Will")]
prompts = [f"{text}\n\nQuestion: What is the secret code of {who}?\nAnswer:" for text, who in stories]
inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
out = model.generate(**inputs, max_new_tokens=8)
for answer in tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True):
    print(answer.strip())
