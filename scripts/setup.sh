#!/usr/bin/env bash
# Makes the virtual environment: scripts/setup.sh VENV STAMP. Called by the Makefile; its variables arrive in the environment.
# While it works, VENV/.unfinished exists; a run that finds it there starts over, since pip takes half-copied packages for whole.
set -euo pipefail
venv=$1
stamp=$2
extra=${EXTRA:-cpu}
candidates=${PYTHON:-python3.13 python3.12 python3.11 python3 python}
log=$venv/setup.log

say() { printf '==> %s\n' "$*"; }
fail() { printf 'set-up failed: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in $candidates; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "disagg needs Python 3.11 or newer; among '$candidates' there is $(python3 --version 2>/dev/null || echo none)." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

python=$(find_python)
if [ -e "$venv/.unfinished" ]; then
    say "an earlier set-up was interrupted; starting over (downloads stay in pip's cache)"
    rm -rf "$venv"
elif [ ! -e "$stamp" ] && compgen -G "$venv/.complete-*" >/dev/null; then
    say "$venv was made for another engine package; starting over for '$extra'"
    rm -rf "$venv"
elif [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
fi
if [ -e "$venv" ]; then
    say "[1/4] virtual environment $venv is there ($("$venv/bin/python" --version)); bringing it up to date"
else
    say "[1/4] virtual environment $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "'$python -m venv' does not work; on Debian and Ubuntu install python3-venv"
fi
touch "$venv/.unfinished"
rm -f "$venv"/.complete-*

say "[2/4] installing disagg[$extra,dev] (about 1 GB, two to ten minutes; all of pip's output is in $log)"
index=()
if [ -n "${TORCH_INDEX:-}" ]; then index=(--extra-index-url "$TORCH_INDEX"); fi
# shellcheck disable=SC2086 # PIP_ARGS is several words on purpose
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    "${index[@]}" ${PIP_ARGS:-} -e ".[$extra,dev]" 2>&1 | tee "$log" |
    sed -u -n -E 's/^ *(Downloading|Using cached) ([^ ]+) \((.*[MG]B)\).*/    \1 \2 (\3)/p; s/^(Installing collected packages).*/    \1 (silent for a minute)/p; /^(ERROR|error|WARNING: Retrying)/p'; then
    if grep -q 'torch==[^ ]*+cpu' "$log"; then
        fail "the engine needs PyTorch's CPU build, which pip's index here does not have." \
            "Pass the one that does (PyTorch's own install page names it for pip and CPU): make setup TORCH_INDEX=URL (pip's own words: $log)"
    fi
    cat >&2 <<EOT
set-up failed: pip could not install disagg[$extra,dev]; the end of $log:
$(tail -n 12 "$log" | sed 's/^/    /')
  no network, or an index that needs settings   see 'pip config list'; pass more with PIP_ARGS="..."
  another vLLM wanted                           EXTRA=cpu or EXTRA=gpu
Then run the same command again.
EOT
    exit 1
fi

say "[3/4] checking the installation"
# vLLM pulls these in; builds that do not match the installed torch break 'import transformers', and nothing here uses them.
for package in torchvision torchaudio torchcodec; do
    if "$venv/bin/python" -m pip show -q "$package" >/dev/null 2>&1 && ! "$venv/bin/python" -c "import $package" >/dev/null 2>&1; then
        echo "    $package does not load next to the installed torch; removing it (not needed)"
        "$venv/bin/python" -m pip uninstall -q -y "$package" >>"$log" 2>&1
    fi
done
"$venv/bin/python" -c 'import disagg.cli, ray, torch, transformers, vllm' >>"$log" 2>&1 ||
    fail "the installed packages do not import: $(tail -n 1 "$log")"
rm -f "$venv/.unfinished"
touch "$stamp"
