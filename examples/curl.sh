#!/usr/bin/env bash
# The HTTP door with curl alone.   Usage: examples/curl.sh [http://HOST:PORT]
set -euo pipefail
url="${1:-http://127.0.0.1:8000}"
ask() { curl --fail-with-body --silent --show-error --noproxy '*' ${DISAGG_TOKEN:+-H "authorization: Bearer $DISAGG_TOKEN"} "$@"; }

echo "# could a request be served now?"
ask "$url/ready"

echo "# what is served"
model="$(ask "$url/v1/models" | grep -o '"id":"[^"]*"' | head -1 | cut -d '"' -f 4)"
echo "$model"

echo "# a completion, for a class of the topology, at a priority, within 30 s"
ask "$url/v1/completions" -H 'content-type: application/json' -H 'x-priority: 3' -H 'x-request-timeout-s: 30' \
    -d "{\"model\": \"$model\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8, \"temperature\": 0}"
echo

echo "# a chat, token by token"
ask --no-buffer "$url/v1/chat/completions" -H 'content-type: application/json' \
    -d "{\"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"max_tokens\": 5, \"stream\": true}"

echo "# what happened so far"
ask "$url/metrics" | grep '^disagg_requests_total'
