"""A document read once and asked twice: the second question loads the document's cache from a folder.

python examples/document_twice.py MODEL
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tq_cache import TurboQuantCache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboquant")
model.to("cuda" if torch.cuda.is_available() else "cpu")
document, folder = Path(__file__).with_name("story.txt").read_text(), Path(tempfile.mkdtemp()) / "story"
for who in ("Frank", "Lily"):
    text = f"{document}\n\nQuestion: What is the secret code of {who}?\nAnswer:"
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    if folder.exists():  # tokens that both prompts begin with are loaded, and not computed again
        cache = TurboQuantCache.from_pretrained(folder, model, input_ids=inputs.input_ids)
    else:
        cache = TurboQuantCache(model.config)
    print(f"{cache.get_seq_length()} of {inputs.input_ids.shape[1]} tokens are there already")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
    print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
    cache.save_pretrained(folder, model=model, input_ids=out[:, : cache.get_seq_length()])
