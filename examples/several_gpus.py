"""Several GPUs: every GPU works at every layer, or each has layers of its own.

torchrun --nproc-per-node 2 examples/several_gpus.py MODEL     # tensor parallel
python examples/several_gpus.py MODEL                          # layers shared out by accelerate
"""

import os
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
parallel = dict(distributed_config=DistributedConfig(tp_plan="auto"))
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, **parallel if "RANK" in os.environ else dict(device_map="auto"))
tq_cache.enable(model)  # on every rank, with the same arguments

story = Path(__file__).with_name("story.txt").read_text()
inputs = tokenizer(f"{story}\n\nQuestion: What is the secret code of Frank?\nAnswer:", return_tensors="pt")
out = model.generate(**inputs.to(model.device), max_new_tokens=8)
if os.environ.get("RANK", "0") == "0":
    print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
