"""Reinforcement learning with TRL: what the trainer samples uses the cache, what it trains on has none.

python examples/with_trl.py MODEL
"""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
data = Dataset.from_list([{"prompt": Path(__file__).with_name("story.txt").read_text()}] * 4)
sizes = dict(per_device_train_batch_size=2, num_generations=2, max_completion_length=16, max_steps=1)
nothing_kept = dict(output_dir=tempfile.mkdtemp(), save_strategy="no", report_to="none")
settings = GRPOConfig(**sizes, **nothing_kept, use_cpu=not torch.cuda.is_available())


def brevity(completions, **_):
    return [-float(len(text)) for text in completions]


trainer = GRPOTrainer(model, brevity, args=settings, train_dataset=data, processing_class=tokenizer)
tq_cache.enable(trainer.model)
trainer.train()
