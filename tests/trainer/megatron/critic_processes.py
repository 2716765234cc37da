"""A critic's own ranks in processes of their own, asked through pipes as Ray's actors are."""

import multiprocessing
from pathlib import Path


def serve(rank, world_size, pipe):
    """Build critics and answer calls until the pipe ends. A call: (method, args); "build" takes what it is built of."""
    import torch

    from vime.platform import get_platform
    from vime.trainer.megatron.patches.lean_import import lean_import

    with lean_import():
        from vime.trainer.megatron.critic_trainer import CriticTrainer

    torch.set_num_threads(1)
    critic = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            if method == "build":
                config, folder, meeting = args
                critic = CriticTrainer(
                    config,
                    hf_path=str(folder),
                    platform=get_platform("cpu"),
                    rank=rank,
                    world_size=world_size,
                    init_method=f"file://{meeting}",
                    total_steps=100,
                )
                pipe.send(("", None))
            else:
                pipe.send(("", getattr(critic, method)(*args)))
        except Exception as error:
            pipe.send((repr(error), None))


class CriticProcesses:
    """`world_size` ranks. Use as a context manager; `build` before the first call, and again after `close`."""

    def __init__(self, world_size, folder: Path):
        self._folder, self._built = folder, 0
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()

    def build(self, config, hf_folder):
        """A critic on all ranks."""
        self._built += 1
        self.ask("build", config, hf_folder, self._folder / f"critics-meet-{self._built}")

    def ask(self, method, *args):
        """Rank 0's answer, when all have answered."""
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = [pipe.recv() for pipe in self._pipes]
        assert not any(problem for problem, _ in answers), answers
        return answers[0][1]
