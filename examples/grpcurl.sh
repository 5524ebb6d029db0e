#!/usr/bin/env bash
# Talk to a gateway from any language: the door is plain gRPC with reflection (proto/disagg/v1/inference.proto).
# Needs grpcurl (https://github.com/fullstorydev/grpcurl).   Usage: examples/grpcurl.sh [HOST:PORT]
set -euo pipefail
address="${1:-127.0.0.1:8500}"

echo "# services"
grpcurl -plaintext "$address" list

echo "# health: SERVING while every pool has a live worker"
grpcurl -plaintext "$address" grpc.health.v1.Health/Check

echo "# what is served"
grpcurl -plaintext "$address" disagg.v1.Inference/GetModelInfo

echo "# text in, tokens and text out, one message per step"
grpcurl -plaintext -d '{"text": "The capital of France is", "sampling": {"max_tokens": 8, "temperature": 0}}' \
    "$address" disagg.v1.Inference/Generate

echo "# token ids in, with a deadline of 30 s"
grpcurl -plaintext -max-time 30 -d '{"token_ids": {"ids": [504, 3575, 282]}, "sampling": {"max_tokens": 4}}' \
    "$address" disagg.v1.Inference/Generate
