#!/bin/sh
# Finds a Python and hands over to rocm_setup.py beside this file: all the logic is there.
# CAROM_PYTHON names one by hand. Exit codes: docs/amd.md; 10 is "no Python".
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 10
for py in "$CAROM_PYTHON" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
  "$here/../../../venv/bin/python" "$here/../../../.venv/bin/python" "$here/../../venv/bin/python" \
  "$(command -v python3)" "$(command -v python)"; do
  if [ -n "$py" ] && [ -x "$py" ]; then
    exec "$py" "$here/rocm_setup.py" "$@"
  fi
done
echo "No Python found. Name the one of ComfyUI or ai-toolkit: CAROM_PYTHON=/path/to/python $0" >&2
exit 10
