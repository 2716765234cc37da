"""The trainer on megatron-core. `vime.trainer.megatron.trainer.MegatronTrainer` is its door."""
