"""The private names of Ray Train: which world sizes its elastic policy picks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError


def elastic_policy(scaling_config: Any, choose: Callable[[int], int], *, ask_for: int) -> Any:
    """Ray Train's elastic scaling policy, with ``choose`` between what the cluster offers and what it starts.

    It asks the cluster's autoscaler for ``ask_for`` workers.

    Reason: the policy takes any integer in the range, asks for the largest, and has no public hook; and it goes by a
    count of the nodes that may be 20 seconds old, so that after the loss of a node it waits a minute for workers to
    start there. It is imported here, late, because readers import this module and have no use for Ray Train.
    """
    from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy

    class ChosenWorldSizes(ElasticScalingPolicy):
        def _count_possible_workers(self, reserved_resources: Any) -> int:
            return choose(super()._count_possible_workers(reserved_resources))

        def _get_num_workers_for_resource_request(self) -> int:
            return ask_for

        def make_decision_for_non_running_worker_group(self) -> Any:
            count = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
            with suppress(RayError):  # then it is the old count, as without this
                ray.get(count, timeout=5)
                self._latest_reserved_resources_query_time = float("-inf")
            return super().make_decision_for_non_running_worker_group()

    return ChosenWorldSizes(scaling_config)


def use_scaling_policy(trainer: Any, make_policy: Callable[[], Any]) -> None:
    """Make every ``trainer.fit()`` run under a new policy of ``make_policy``.

    Reason: ``fit()`` makes the policy itself and hands it to this method.
    """
    run = trainer._initialize_and_run_controller

    def run_with_policy(**kwargs: Any) -> Any:
        return run(**kwargs | {"scaling_policy": make_policy()})

    trainer._initialize_and_run_controller = run_with_policy
