"""A server that answers several people at once, each from a thread and a cache of its own, as Gradio does.

python examples/threaded_server.py MODEL
curl --no-buffer --data "Once upon a time" http://127.0.0.1:8000

A function for Gradio yields all of the text so far: `yield from itertools.accumulate(answer(message))`.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import tq_cache
from tq_cache.tools.runs import EMBEDDED_MODEL

name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_MODEL
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).to("cuda" if torch.cuda.is_available() else "cpu")
tq_cache.enable(model)


def answer(message):
    inputs = tokenizer(message, return_tensors="pt").to(model.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    Thread(target=model.generate, kwargs=dict(inputs, streamer=streamer, max_new_tokens=40)).start()
    yield from streamer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        message = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.send_response(200)
        self.end_headers()
        for text in answer(message):
            self.wfile.write(text.encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
