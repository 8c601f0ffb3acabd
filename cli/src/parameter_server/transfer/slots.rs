//! The static slots of one peer: one for each variable and direction.

use tonic_rdma_tensor::{Channel, ChannelError, RdmaDevice, StaticReceiver, StaticSender};

use super::check::{Receipt, TensorPosition};
use super::variables::{Layout, Variables};
use crate::failure::Failure;
use crate::measure::transport::rdma::Rdma;
use crate::parameter_server::mode::TransferMode;

/// The direction of tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SlotDirection {
    /// Variables, to a worker.
    Pull,
    /// Gradients, to the server.
    Push,
}

/// Makes the tensor device of this process, on a free port of the loopback interface.
pub(crate) async fn device(provider: &str) -> Result<RdmaDevice, Failure> {
    Rdma::new(provider)?.tensor_device().bind("127.0.0.1:0").await.map_err(failure)
}

/// Opens a channel to the device that listens on `endpoint`.
pub(crate) async fn channel(device: &RdmaDevice, endpoint: &str) -> Result<Channel, Failure> {
    device.channel(endpoint, 0).await.map_err(failure)
}

/// The receiving ends of the slots.
#[derive(Debug)]
pub(crate) struct Receivers {
    slots: Vec<StaticReceiver>,
    layout: Layout,
}

impl Receivers {
    /// Makes slots for all tensors of `layout`, which go to or from `worker`.
    pub(crate) fn new(
        device: &RdmaDevice,
        direction: SlotDirection,
        worker: u32,
        layout: Layout,
    ) -> Result<Self, Failure> {
        let slot = |(index, spec)| device.static_receiver(&name(direction, worker, index), spec, 1);
        let slots = layout.specs().enumerate().map(slot).collect::<Result<_, _>>().map_err(failure)?;
        Ok(Self { slots, layout })
    }

    /// Receives each tensor of mini-batch `step` once, and consumes it in the slot.
    pub(crate) async fn receive(&mut self, step: u64, receipt: &mut Receipt) -> Result<(), Failure> {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let arrived = slot.recv().await.map_err(failure)?;
            receipt.take_from_slot(TensorPosition { layout: &self.layout, index, step }, &arrived)?;
        }
        Ok(())
    }
}

/// The sending ends of the slots.
#[derive(Debug)]
pub(crate) struct Senders {
    slots: Vec<StaticSender>,
    _channel: Channel,
}

impl Senders {
    /// Attaches to all slots of the peer for tensors of `layout`, which go to or from `worker`.
    pub(crate) async fn attach(
        channel: Channel,
        direction: SlotDirection,
        worker: u32,
        layout: &Layout,
    ) -> Result<Self, Failure> {
        let mut slots = Vec::with_capacity(layout.len());
        for (index, spec) in layout.specs().enumerate() {
            let slot = channel.static_sender(&name(direction, worker, index), spec).await;
            slots.push(slot.map_err(failure)?);
        }
        Ok(Self { slots, _channel: channel })
    }

    /// Sends each tensor of mini-batch `step` in `mode`. Tensors may still be in flight afterwards.
    pub(crate) async fn send(
        &mut self,
        mode: TransferMode,
        variables: &Variables,
        step: u64,
    ) -> Result<(), Failure> {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let tensor = variables.tensor(index, step)?;
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

    /// Waits until the peer has consumed all tensors.
    pub(crate) async fn flush(&mut self) -> Result<(), Failure> {
        for slot in &mut self.slots {
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
