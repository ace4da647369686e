"""A model with a LoRA adapter.

python examples/with_peft.py MODEL
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).to("cuda" if torch.cuda.is_available() else "cpu")
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))  # or PeftModel.from_pretrained(model, ADAPTER)
tq_cache.enable(model)

story = Path(__file__).with_name("story.txt").read_text()
inputs = tokenizer(f"{story}\n\nQuestion: What is the secret code of Frank?\nAnswer:", return_tensors="pt")
out = model.generate(**inputs.to(model.device), max_new_tokens=8)
print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
