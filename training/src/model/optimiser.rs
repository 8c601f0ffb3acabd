//! Gradient descent with momentum.

use candle_core::{Error, Result};

use super::{Network, set, values};

/// Gradient descent with momentum (Polyak 1964): `velocity = momentum · velocity + gradient`, then `weight −= rate · velocity`. Equal
/// weights and equal gradients give equal weights on all ranks, bit for bit.
#[derive(Debug)]
pub(crate) struct Optimiser {
    rate: f32,
    momentum: f32,
    states: Vec<State>,
}

/// The state of one parameter.
#[derive(Debug)]
struct State {
    weights: Vec<f32>,
    velocities: Vec<f32>,
}

impl Optimiser {
    /// Makes the state for the current weights of a network.
    pub(crate) fn new(network: &Network, rate: f32, momentum: f32) -> Result<Self> {
        let state = |parameter| {
            let weights = values(parameter)?;
            Ok(State { velocities: vec![0.0; weights.len()], weights })
        };
        Ok(Self { rate, momentum, states: network.parameters().map(state).collect::<Result<_>>()? })
    }

    /// Changes the parameter with this index in [`Network::parameters`].
    pub(crate) fn step(&mut self, network: &Network, index: usize, gradient: &[f32]) -> Result<()> {
        let (rate, momentum) = (self.rate, self.momentum);
        let (Some(state), Some(parameter)) = (self.states.get_mut(index), network.parameters().nth(index))
        else {
            return Err(Error::Msg(format!("there is no parameter {index}")));
        };
        if gradient.len() != state.weights.len() {
            let (found, wanted) = (gradient.len(), state.weights.len());
            return Err(Error::Msg(format!("parameter {index} has {wanted} elements, its gradient {found}")));
        }
        let elements = state.weights.iter_mut().zip(&mut state.velocities).zip(gradient);
        for ((weight, velocity), gradient) in elements {
            *velocity = momentum * *velocity + gradient;
            *weight -= rate * *velocity;
        }
        set(parameter, &state.weights)
    }
}
