#!/usr/bin/env bash
# Runs the job on a spot TPU v5e-16 until it has finished. Start it in the clone, on any machine with
# gcloud; if it is interrupted, start it again.
#
#     BUCKET=my-bucket ZONE=us-west4-a bash docs/clusters/tpu_job.sh
set -euo pipefail
bucket="${BUCKET:?the name of a bucket for the checkpoints}"
zone="${ZONE:-us-west4-a}"
name="${NAME:-digits}"
attempts="${ATTEMPTS:-20}"

tpu() { gcloud compute tpus tpu-vm "$@" --zone="$zone"; }
state() { tpu describe "$name" --format='value(state)' 2>/dev/null || echo NONE; }
on_all_hosts() { tpu ssh "$name" --worker=all --command="$1"; }

make() {
  # A preempted spot TPU cannot be restarted; it is deleted before a new one is created.
  { [ "$(state)" = NONE ] || tpu delete "$name" --quiet; } &&
    tpu create "$name" --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot
}

prepare() {
  local archive
  archive="$(mktemp -d)/digits.tar.gz" &&
    git archive --format=tar.gz --output="$archive" HEAD &&
    tpu scp "$archive" "$name:" --worker=all &&
    on_all_hosts "mkdir -p digits && tar -xzf digits.tar.gz -C digits &&
      bash digits/docs/clusters/tpu_host.sh $bucket"
}

train() {
  # A lost connection may have left a process behind, which would hold the chips.
  on_all_hosts "pkill -TERM -f '^[^ ]*python [^ ]*digits_job' && sleep 30; cd digits &&
    exec .venv/bin/python examples/digits_job.py --tpu --directory=\$HOME/checkpoints/digits --steps=2000"
}

for attempt in $(seq "$attempts"); do
  echo "attempt $attempt of $attempts"
  if { [ "$(state)" = READY ] || make; } && prepare && train; then
    echo "finished; the TPU is deleted, the checkpoints stay in gs://$bucket"
    tpu delete "$name" --quiet
    exit 0
  fi
done
echo "not finished after $attempts attempts" >&2
exit 1
