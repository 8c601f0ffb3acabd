//! Sends that could not begin yet.

use std::collections::{BTreeMap, VecDeque};
use std::task::{Context, Poll};

use tonic_rdma_tensor::Tensor;

use super::transfers::{Start, Transfers};
use crate::error::GraphError;
use crate::placement::CrossingId;

/// Sends that wait for a buffer, by crossing tensor, in the order of the steps.
#[derive(Debug, Default)]
pub(super) struct Sends {
    waiting: BTreeMap<CrossingId, VecDeque<(u64, Tensor)>>,
}

impl Sends {
    /// Begins a send, or keeps it for later. Returns whether it has begun.
    pub(super) fn start<V>(
        &mut self,
        transfers: &mut dyn Transfers<V>,
        crossing: CrossingId,
        step: u64,
        tensor: Tensor,
    ) -> Result<bool, GraphError> {
        if let Some(waiting) = self.waiting.get_mut(&crossing) {
            waiting.push_back((step, tensor));
            return Ok(false);
        }
        if transfers.start(crossing, step, &tensor)? == Start::Begun {
            return Ok(true);
        }
        self.waiting.insert(crossing, VecDeque::from([(step, tensor)]));
        Ok(false)
    }

    /// Tries each crossing tensor again. Returns the steps of the sends that have begun.
    pub(super) fn retry<V>(&mut self, transfers: &mut dyn Transfers<V>) -> Result<Vec<u64>, GraphError> {
        let mut begun = Vec::new();
        for (crossing, waiting) in &mut self.waiting {
            while let Some((step, tensor)) = waiting.front() {
                if transfers.start(*crossing, *step, tensor)? == Start::Busy {
                    break;
                }
                begun.push(*step);
                waiting.pop_front();
            }
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
        Ok(begun)
    }

    /// Returns the send that waits for the oldest step.
    pub(super) fn oldest(&self) -> Option<(u64, CrossingId)> {
        self.waiting.iter().filter_map(|(crossing, waiting)| Some((waiting.front()?.0, *crossing))).min()
    }

    /// Returns whether one of the sends can begin. Otherwise the waker of `context` is woken when one can.
    pub(super) fn can_begin<V>(
        &self,
        transfers: &mut dyn Transfers<V>,
        context: &mut Context<'_>,
    ) -> Result<bool, GraphError> {
        let mut can = false;
        for crossing in self.waiting.keys() {
            match transfers.poll_ready(*crossing, context) {
                Poll::Ready(ready) => {
                    ready?;
                    can = true;
                }
                Poll::Pending => {}
            }
        }
        Ok(can)
    }
}
