#!/bin/sh
# Finds the Python of ComfyUI or ai-toolkit and runs rocm_setup.py with it. CAROM_PYTHON names one by hand.
# Exit codes: docs/amd.md
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 10
if [ -n "$CAROM_PYTHON" ]; then
  py=${CAROM_PYTHON#[\"\']}
  py=${py%[\"\']}
  if [ ! -f "$py" ] || [ ! -x "$py" ]; then
    echo "CAROM_PYTHON names '$py', which is no program. Set it to the path of a python, or unset it." >&2
    exit 10
  fi
  exec "$py" "$here/rocm_setup.py" "$@"
fi
for folder in "$here/../../ai-toolkit" "$here/../../ComfyUI" "$here/../.." "$here/../../.."; do
  for env in .venv venv env; do
    if [ -x "$folder/$env/bin/python" ]; then
      exec "$folder/$env/bin/python" "$here/rocm_setup.py" "$@"
    fi
  done
done
for py in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" \
  "$(command -v python3)" "$(command -v python)"; do
  if [ -n "$py" ] && [ -x "$py" ]; then
    exec "$py" "$here/rocm_setup.py" "$@"
  fi
done
echo "No Python found. Name the one of ComfyUI or ai-toolkit: CAROM_PYTHON=/path/to/python $0" >&2
exit 10
