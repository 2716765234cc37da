"""Who says what of the same tokens under the same weights: engine, trainer and HF transformers, and how they differ."""
