"""Trains in the workers of Ray Train: a process for each worker, and one mesh over all of them.

  python ray_train.py --workdir=/shared/runs/ray --num_workers=2 --config.train.steps=20

Connects to the Ray cluster that RAY_ADDRESS names; without one it starts Ray on this machine. Run
again, it resumes from the newest checkpoint in the workdir, and so do workers that Ray restarts.
"""

import argparse

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer


def train_on_worker(settings):
    # Imported here: the process that calls `fit` must not take the accelerator of a worker.
    import meshtrain
    from meshtrain.train import train

    meshtrain.initialize()  # joins the workers, unless JaxTrainer has done so
    config = meshtrain.load_config("quickstart", settings["overrides"])
    result = train(config, workdir=settings["workdir"])
    metrics = {"step": result.step, "eval_loss": result.eval_loss}
    # On every worker: `report` waits for all of them, and `on_metrics` is called on one.
    ray.train.report(metrics)
    return metrics


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--workdir", required=True, help="folder on a file system of all hosts")
    flags.add_argument("--num_workers", type=int, default=2)
    flags.add_argument("--use_gpu", action="store_true", help="one GPU for each worker")
    flags.add_argument("--max_failures", type=int, default=0, help="restarts after lost workers")
    args, overrides = flags.parse_known_args()

    trainer = JaxTrainer(
        train_on_worker,
        train_loop_config={"workdir": args.workdir, "overrides": overrides},
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=RunConfig(
            storage_path=f"{args.workdir}/ray",
            failure_config=FailureConfig(max_failures=args.max_failures),
        ),
    )
    print(trainer.fit().return_value)


if __name__ == "__main__":
    main()
