"""A generation loop of your own: the cache is one argument of the model.

python examples/own_loop.py MODEL
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tq_cache import TurboQuantCache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboquant")
model.to("cuda" if torch.cuda.is_available() else "cpu")
cache = TurboQuantCache(model.config)
story = Path(__file__).with_name("story.txt").read_text()
prompt = f"{story}\n\nQuestion: What is the secret code of Frank?\nAnswer:"
ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
with torch.inference_mode():
    for _ in range(7):
        ids = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        print(tokenizer.decode(ids[0]), end="")
print("", cache.report(), sep="\n")
