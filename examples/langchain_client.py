"""LangChain against a gateway: it is an OpenAI endpoint like any other.

pip install langchain-openai
python examples/langchain_client.py [http://HOST:PORT]
"""

import os
import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main(url: str = "http://127.0.0.1:8000", model: str = "smollm2-135m") -> None:
    chat = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=os.environ.get("DISAGG_TOKEN", "none"),
        model=model,
        max_tokens=24,
        temperature=0,
        default_headers={"x-priority": "5"},  # higher goes first
    )
    chain = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")]) | chat | StrOutputParser()

    print(chain.invoke({"question": "What is a prefill?"}))
    for text in chain.stream({"question": "What is a decode step?"}):
        print(text, end="", flush=True)
    print()
    print(chain.batch([{"question": "One?"}, {"question": "Two?"}]))


if __name__ == "__main__":
    main(*sys.argv[1:])
