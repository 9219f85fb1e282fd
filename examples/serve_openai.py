# SPDX-License-Identifier: Apache-2.0
"""A served model with token trees, used by several streaming clients at once through the official openai package.

Starts serve_openai.sh on a free port, talks to it and stops it; with --url it talks to a server that runs already.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import AsyncOpenAI

PROMPTS = ["Write a haiku about trees.", "Write the numbers from 1 to 30.", "What is a queue? Show one in Python."]


@contextlib.contextmanager
def server(model: str):
    """The address of a fresh server. It is stopped at the end, and killed if it does not stop."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        Path(__file__).with_name("serve_openai.sh"),
        model,
        "--port",
        str(port),
        "--uvicorn-log-level",
        "warning",
    ]
    process = subprocess.Popen(command, start_new_session=True, env={"VLLM_LOGGING_LEVEL": "ERROR", **os.environ})
    try:
        print("starting the server, about a minute", flush=True)
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(1)
        else:
            sys.exit(f"the server ended with code {process.returncode}; its message stands above")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it left behind


async def ask(client: AsyncOpenAI, model: str, prompt: str, tokens: int) -> None:
    """One chat, streamed; printed when its last words came."""
    begin, times, words = time.perf_counter(), [], []
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=tokens, temperature=0, stream=True
    )
    async for chunk in stream:  # one chunk per LLM step: one token, or several where a tree was right
        if chunk.choices and chunk.choices[0].delta.content:
            words.append(chunk.choices[0].delta.content)
            times.append(time.perf_counter() - begin)
    print(f"\n> {prompt}\n{''.join(words).strip()}")
    print(f"[{len(words)} chunks, the first after {times[0]:.1f} s, the last after {times[-1]:.1f} s]")


async def ask_all(url: str, tokens: int) -> None:
    """All prompts at the same time."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(*(ask(client, model, prompt, tokens) for prompt in PROMPTS))


def main() -> None:
    """Serve, ask, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--url", help="base URL of a running server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per chat (default 96)")
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else server(options.model) as url:
        asyncio.run(ask_all(url, options.tokens))


if __name__ == "__main__":
    main()
