"""The engine. Knows torch and safetensors, and no host program."""
