"""Many requests at once, a retry where it can help, and a cancel.

python examples/async_client.py [HOST:PORT]
"""

import asyncio
import sys
from contextlib import aclosing

from disagg.client import Answer, AsyncClient
from disagg.errors import DisaggError, RejectedError

PROMPTS = ["The three primary colours are", "Water boils at", "A haiku about spring:", "The opposite of cold is"]


async def patient(client: AsyncClient, prompt: str) -> Answer:
    """Ask again when the gateway is full, after the time that it names."""
    for _ in range(5):
        try:
            return await client.generate(prompt, max_tokens=24, temperature=0.0, timeout_s=120)
        except RejectedError as error:
            await asyncio.sleep(error.retry_after_s)
    raise DisaggError("still full after five tries")


async def main(address: str = "127.0.0.1:8500") -> None:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(patient(client, prompt) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {answer.text!r}")

        # Stop after five parts: closing the stream frees what the request holds on every worker.
        async with aclosing(client.stream("Count to a thousand: 1, 2, 3,", max_tokens=200)) as parts:
            seen = 0
            async for part in parts:
                print(part.text, end="", flush=True)
                seen += 1
                if seen == 5:
                    break
        print(" ... cancelled")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
