#!/usr/bin/env bash
# Prepares one host of a TPU for the job. What is already installed is kept.
set -euo pipefail
bucket="$1"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# uv installs a Python, whichever one the image has.
export PATH="$HOME/.local/bin:$PATH"
command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
[ -d .venv ] || uv venv --python 3.12 .venv
uv pip install --python .venv/bin/python '.[tpu,examples]'

if ! command -v gcsfuse >/dev/null; then
  key=/usr/share/keyrings/cloud.google.asc
  from=https://packages.cloud.google.com/apt
  curl -fsSL "$from/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
  echo "deb [signed-by=$key] $from gcsfuse-$(lsb_release -cs) main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  # A new machine updates itself first; apt waits for it.
  sudo apt-get -o DPkg::Lock::Timeout=300 update
  sudo apt-get -o DPkg::Lock::Timeout=300 install --yes gcsfuse
fi

# Without metadata caches the other hosts see at once what one host writes.
mkdir -p "$HOME/checkpoints"
mountpoint -q "$HOME/checkpoints" ||
  gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 \
    "$bucket" "$HOME/checkpoints"
