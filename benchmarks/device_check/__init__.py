"""One run on a machine with a GPU: does the CUDA path work there, and how fast is it? ../device_check.sh starts it."""
