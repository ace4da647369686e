"""A chat over one cache: each turn computes only the tokens that are new.

python examples/chat.py MODEL          # an empty line ends it
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.chat_template = tokenizer.chat_template or "{% for m in messages %}{{ m.content }}\n{% endfor %}Answer:"
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboquant")
model.to("cuda" if torch.cuda.is_available() else "cpu")
cache = tq_cache.TurboQuantCache(model.config)
messages, out = [], None
while line := input("> "):
    messages.append({"role": "user", "content": line})
    options = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = tokenizer.apply_chat_template(messages, **options).to(model.device)
    held = cache.get_seq_length()
    if held and not torch.equal(inputs.input_ids[:, :held], out[:, :held]):
        cache.reset()  # the template has rewritten earlier turns, as some do to thoughts
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=200, streamer=streamer)
    said = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": said})
