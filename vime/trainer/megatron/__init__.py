"""The trainer on megatron-core. `vime.trainer.megatron.trainer.MegatronTrainer` is its door."""

import warnings

# megatron-core says on import, once per module, that it falls back to torch; here that is the plan, not a fallback.
warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|Megatron).*", module=r"megatron\.core.*")
