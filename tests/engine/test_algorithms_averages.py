import pytest
import torch

from engine.algorithms.averages import ema_update


def test_average_keeps_its_share_and_moves_in_place():
    averages = [torch.tensor([1.0, 2.0]), torch.zeros(2, 2)]
    storage = [each.data_ptr() for each in averages]
    parameters = [torch.tensor([3.0, -2.0], requires_grad=True), torch.ones(2, 2)]
    ema_update(averages, parameters, 0.75)
    assert averages[0].tolist() == [1.5, 1.0]
    assert averages[1].tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert [each.data_ptr() for each in averages] == storage
    assert not averages[0].requires_grad
    assert parameters[0].tolist() == [3.0, -2.0]


def test_distance_to_a_fixed_parameter_shrinks_by_the_decay():
    averages, parameter = [torch.zeros(3)], torch.full((3,), 10.0)
    for _ in range(200):
        ema_update(averages, [parameter], 0.992)
    assert 10 - averages[0][0].item() == pytest.approx(10 * 0.992**200, rel=1e-4)


def test_ends_of_the_decay():
    averages, parameters = [torch.tensor([1.0])], [torch.tensor([5.0])]
    ema_update(averages, parameters, 1.0)
    assert averages[0] == 1.0
    ema_update(averages, parameters, 0.0)
    assert averages[0] == 5.0


def test_small_updates_of_sixteen_bit_parameters_are_not_lost():
    parameter = torch.ones(4, dtype=torch.bfloat16)
    averages = [torch.full((4,), 1 - 2**-9)]
    ema_update(averages, [parameter], 0.992)
    moved = averages[0] - (1 - 2**-9)
    assert moved.tolist() == pytest.approx([0.008 * 2**-9] * 4, rel=1e-2)


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        ema_update([torch.zeros(2, dtype=torch.bfloat16)], [torch.zeros(2)], 0.9)
    with pytest.raises(ValueError, match="shorter"):
        ema_update([torch.zeros(2), torch.zeros(2)], [torch.zeros(2)], 0.9)
