"""Any OpenAI client works unchanged: completions, chat, streaming, structured answers; an SLO class is one more field.

pip install openai
python examples/openai_client.py [http://HOST:PORT]
"""

import json
import os
import sys

import openai

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    # The key is the gateway's bearer token, where it asks for one (gateway.token_file).
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("DISAGG_TOKEN", "none"))
    model = client.models.list().data[0].id

    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1)
    print(answer.choices[0].text, answer.usage.completion_tokens, "tokens")

    talk = [{"role": "user", "content": "Name three colours."}]
    for chunk in client.chat.completions.create(model=model, messages=talk, max_tokens=32, seed=7, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    # Batch work leaves room for people: a class of the topology's slo_classes.
    try:
        client.completions.create(model=model, prompt="Once", max_tokens=4, extra_body={"slo_class": "batch"})
    except openai.BadRequestError as error:  # this gateway has no such class, and says which it has
        print(error.message)

    # The answer follows a JSON schema (a real engine only; a simulated one refuses it).
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    try:
        found = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Tell me of Paris."}], max_tokens=60, temperature=0, response_format=form
        )
        print(json.loads(found.choices[0].message.content))
    except (openai.APIStatusError, json.JSONDecodeError) as error:
        print("no form:", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
