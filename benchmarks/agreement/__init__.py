"""How well HF, trainer and engine agree: python -m benchmarks.agreement --cpu"""
