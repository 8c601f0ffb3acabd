//! The static slots between a worker and its servers: one for each variable and direction.

use std::sync::Arc;

use tonic_rdma_commands::Failure;
use tonic_rdma_tensor::{Channel, ChannelError, RdmaDevice, StaticReceiver, StaticSender};

use super::check::{Receipt, TensorPosition};
use super::variables::{Layout, Variables};
use crate::parameter_server::mode::TransferMode;
use crate::parameter_server::options::ProcessOptions;

/// The direction of tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SlotDirection {
    /// Variables, to a worker.
    Pull,
    /// Gradients, to the server.
    Push,
}

/// Makes the tensor device of this process, on a free port of the loopback interface.
pub(crate) async fn device(options: &ProcessOptions) -> Result<RdmaDevice, Failure> {
    options.rdma()?.tensor_device().bind("127.0.0.1:0").await.map_err(failure)
}

/// Opens a channel to the device that listens on `endpoint`.
pub(crate) async fn channel(device: &RdmaDevice, endpoint: &str) -> Result<Channel, Failure> {
    device.channel(endpoint, 0).await.map_err(failure)
}

/// The receiving ends of the slots, in the order of the model's variables.
#[derive(Debug)]
pub(crate) struct Receivers {
    slots: Vec<(usize, StaticReceiver)>,
    layouts: Vec<Layout>,
}

impl Receivers {
    /// Makes slots for all tensors of `layouts`, which go to or from `worker`. A server has its own layout alone. A worker
    /// has the layouts of all servers, in their order.
    pub(crate) fn new(
        device: &RdmaDevice,
        direction: SlotDirection,
        worker: u32,
        layouts: Vec<Layout>,
    ) -> Result<Self, Failure> {
        let slot = |(index, spec)| {
            Ok((index, device.static_receiver(&name(direction, worker, index), spec, 1).map_err(failure)?))
        };
        let mut slots =
            layouts.iter().flat_map(Layout::specs).map(slot).collect::<Result<Vec<_>, Failure>>()?;
        slots.sort_by_key(|(index, _)| *index);
        Ok(Self { slots, layouts })
    }

    /// Receives each tensor of mini-batch `step` once, and consumes it in the slot.
    pub(crate) async fn receive(&mut self, step: u64, receipt: &mut Receipt) -> Result<(), Failure> {
        for (index, slot) in &mut self.slots {
            let arrived = slot.recv().await.map_err(failure)?;
            let layout = &self.layouts[*index % self.layouts.len()];
            receipt.take_from_slot(TensorPosition { layout, index: *index, step }, &arrived)?;
        }
        Ok(())
    }
}

/// The sending ends of the slots, in the order of the model's variables.
#[derive(Debug)]
pub(crate) struct Senders {
    slots: Vec<(usize, StaticSender)>,
    _channels: Vec<Channel>,
}

impl Senders {
    /// Attaches to all slots of the peers at the ends of `channels` for tensors of `layouts`, one for each peer. The
    /// tensors go to or from `worker`.
    pub(crate) async fn attach(
        channels: Vec<Channel>,
        direction: SlotDirection,
        worker: u32,
        layouts: &[&Layout],
    ) -> Result<Self, Failure> {
        let mut slots = Vec::new();
        for (channel, layout) in channels.iter().zip(layouts) {
            for (index, spec) in layout.specs() {
                let slot = channel.static_sender(&name(direction, worker, index), spec).await;
                slots.push((index, slot.map_err(failure)?));
            }
        }
        slots.sort_by_key(|(index, _)| *index);
        Ok(Self { slots, _channels: channels })
    }

    /// Sends each tensor of mini-batch `step` in `mode`. Tensors may still be in flight afterwards. `variables` has the
    /// tensors for each server, or those of one server.
    pub(crate) async fn send(
        &mut self,
        mode: TransferMode,
        variables: &[Arc<Variables>],
        step: u64,
    ) -> Result<(), Failure> {
        for (index, slot) in &mut self.slots {
            let tensor = variables[*index % variables.len()].tensor(*index, step)?;
            let sent = match mode {
                TransferMode::RdmaZerocp => slot.send(&tensor).await,
                _ => {
                    slot.send_bytes(
                        tensor
                            .bytes()
                            .map_err(|error| Failure::run("a tensor has no bytes").because(error))?,
                    )
                    .await
                }
            };
            sent.map_err(failure)?;
        }
        Ok(())
    }

    /// Waits until the peers have consumed all tensors.
    pub(crate) async fn flush(&mut self) -> Result<(), Failure> {
        for (_, slot) in &mut self.slots {
            slot.flush().await.map_err(failure)?;
        }
        Ok(())
    }
}

fn name(direction: SlotDirection, worker: u32, index: usize) -> String {
    match direction {
        SlotDirection::Pull => format!("worker {worker}/variable {index}"),
        SlotDirection::Push => format!("worker {worker}/gradient {index}"),
    }
}

fn failure(error: ChannelError) -> Failure {
    Failure::run("a static slot failed").because(error)
}
