"""`taskkill /F /T /PID NUMBER`: ends a process and the processes that it started."""

import sys

import psutil

number = int(sys.argv[sys.argv.index("/PID") + 1])
try:
    process = psutil.Process(number)
    family = [*process.children(recursive=True), process] if "/T" in sys.argv else [process]
except psutil.Error:
    sys.exit(f'ERROR: The process "{number}" not found.')
for one in family:
    one.kill()
