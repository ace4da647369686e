"""Text printed as it is made.

python examples/streaming.py MODEL
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).to("cuda" if torch.cuda.is_available() else "cpu")
tq_cache.enable(model)

story = Path(__file__).with_name("story.txt").read_text()
inputs = tokenizer(story.strip(), return_tensors="pt").to(model.device)
model.generate(**inputs, max_new_tokens=40, streamer=TextStreamer(tokenizer, skip_prompt=True))
