"""How fast, and how sure? The measurements that the figures of the docs come from; run them from the checkout.

- `python -m benchmarks.guarantees`: are guarantees kept, and what do they cost, where the truth is known?
- `python -m benchmarks.drift`: how often does a monitor give a false alarm, and how soon does it find a change?
- `python -m benchmarks.training`: a training step against the plain padded one.
- `python -m benchmarks.recording`: a recording against the bare forward pass.
- `python -m benchmarks.sweep`: a sweep against its signal, and against a replay of every threshold.
- `python -m benchmarks.scoring`: all loops of a benchmark's questions in one pass, against the usual ways.

`loopscope bench` measures your own models.
"""
