//! The sender: where a cell's tensors come from, and the places that they go to.

use std::sync::Arc;

use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::{
    BlockCopy, Channel, ChannelError, MemRegion, Memcpy, MemcpyError, RdmaDevice, RemoteRegion, StaticSender,
    Tensor, TensorError,
};

use super::super::client::CallError;
use super::super::content::{VARIANTS, offset_of, variant_seed};
use super::super::layout::Layout;
use super::super::mode::Mode;
use super::super::operations::{Operation, Operations};
use super::geometry::{self, Batch, Geometry, identify, seeds_in_order};
use super::sink::{header_name, region_name, slot_name};

/// What a cell's operations take to be sent.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) to: To,
    /// Of the first operation's content.
    pub(super) seed: u64,
}

#[derive(Debug)]
pub(super) enum To {
    Slots { slots: Vec<StaticSender>, from: From },
    Batch(Box<Batched>),
}

/// Where the tensors of slots lie.
#[derive(Debug)]
pub(super) enum From {
    /// In registered memory: by variant of the content, and slot.
    Registered(Vec<Vec<Tensor>>),
    /// In a region for each variant, for the one slot; absent while an operation has it.
    Regions(Vec<Option<MemRegion>>),
    /// Anywhere: each is copied when it is sent.
    Anywhere,
}

/// See [`Geometry::Batch`].
#[derive(Debug)]
pub(super) struct Batched {
    batch: Batch,
    pub(super) header: StaticSender,
    remote: RemoteRegion,
    channel: Channel,
    /// Registered memory that the buffers are sent from; absent while a batch is on its way from there.
    region: Option<MemRegion>,
    moving: Option<Memcpy>,
    /// Whether it is the content itself, and not room for a copy.
    holds_content: bool,
    depth: u64,
    sent: u64,
}

impl Route {
    /// Attaches to the places that the server has made for `operations`, and fills registered memory if nothing is to be
    /// copied.
    pub(super) async fn new(
        mode: Mode,
        (device, channel): (&RdmaDevice, &Channel),
        operations: &Operations,
        depth: u32,
    ) -> Result<Self, CallError> {
        let content = operations.content();
        let (seed, zero_copy) = (content.seed(), mode.sends_in_place());
        let to = match Geometry::of(operations.load(), seed) {
            Geometry::Slots(lengths) => {
                let from = match &*lengths {
                    [length] if mode.awaits() => {
                        From::Regions(regions(device, content.all(), seed, *length)?)
                    }
                    _ if zero_copy => From::Registered(tensors(content.all(), seed, &lengths)?),
                    _ => From::Anywhere,
                };
                let mut slots = Vec::with_capacity(lengths.len());
                for (index, length) in lengths.iter().enumerate() {
                    slots.push(channel.static_sender(&slot_name(mode, index), &spec(*length)?).await?);
                }
                To::Slots { slots, from }
            }
            Geometry::Batch(batch) => {
                let remote = channel.region(&region_name(mode)).await?;
                let words = 8 * batch.words() as u64;
                let header = channel.static_sender(&header_name(mode), &spec(words)?).await?;
                let bytes = if zero_copy { content.all().len() } else { length(batch.room)? };
                let mut region = device.allocate(bytes)?;
                if zero_copy {
                    region.copy_from_slice(content.all());
                }
                To::Batch(Box::new(Batched {
                    batch,
                    header,
                    remote,
                    channel: channel.clone(),
                    region: Some(region),
                    moving: None,
                    holds_content: zero_copy,
                    depth: depth.into(),
                    sent: 0,
                }))
            }
        };
        Ok(Self { to, seed })
    }

    /// What the receiver will take `operation` to be.
    pub(super) fn identity(&self, operation: &Operation) -> Option<u64> {
        let (seed, buffer) = operation.buffers().next()?;
        match &self.to {
            To::Slots { .. } => identify(self.seed, &buffer[..buffer.len().min(8)]),
            To::Batch(_) => Some(seed),
        }
    }

    /// Whether the next operation can be started.
    pub(super) fn is_ready(&mut self) -> Result<bool, CallError> {
        match &mut self.to {
            To::Slots { slots, .. } => {
                for slot in slots {
                    if !slot.is_ready()? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            To::Batch(batched) => Ok(batched.has_region()? && batched.header.is_ready()?),
        }
    }

    /// Starts an operation; only when ready.
    pub(super) fn start(&mut self, operation: &Operation) -> Result<(), CallError> {
        match &mut self.to {
            To::Slots { slots, from: From::Registered(tensors) } => {
                let variant = variant_of(self.seed, operation);
                for (slot, tensor) in slots.iter_mut().zip(&tensors[variant]) {
                    slot.start(tensor)?;
                }
                Ok(())
            }
            // A sender that polls has no regions: only a future gives them back.
            To::Slots { slots, from: From::Anywhere | From::Regions(_) } => {
                for (slot, (_, buffer)) in slots.iter_mut().zip(operation.buffers()) {
                    slot.start_bytes(buffer)?;
                }
                Ok(())
            }
            To::Batch(batched) => batched.start(operation, self.seed),
        }
    }

    /// Operations that were started and whose end the receiver has not told yet.
    pub(super) fn pending(&mut self) -> Result<u64, CallError> {
        match &mut self.to {
            // They come in the order of the slots, and go in that order.
            To::Slots { slots, .. } => Ok(slots.last_mut().map_or(Ok(0), StaticSender::pending)?),
            To::Batch(batched) => {
                batched.has_region()?;
                Ok(batched.header.pending()?)
            }
        }
    }
}

impl Batched {
    /// Whether nothing is on its way from the region.
    fn has_region(&mut self) -> Result<bool, CallError> {
        if let Some(result) = self.moving.as_mut().and_then(Memcpy::try_take) {
            self.moving = None;
            keep(&mut self.region, result)?;
        }
        Ok(self.region.is_some())
    }

    fn start(&mut self, operation: &Operation, origin: u64) -> Result<(), CallError> {
        let (moving, header) = self.start_blocks(operation, origin)?;
        self.moving = Some(moving);
        // On one queue pair: it comes behind the blocks.
        Ok(self.header.start_bytes(&header)?)
    }

    /// Begins to move the blocks. To be followed by the header that comes with them.
    fn start_blocks(&mut self, operation: &Operation, origin: u64) -> Result<(Memcpy, Vec<u8>), CallError> {
        let Some(mut region) = self.region.take() else { return Err(ChannelError::Busy(1).into()) };
        let lengths: Vec<u64> = operation.buffers().map(|(_, buffer)| buffer.len() as u64).collect();
        let start = (self.sent % self.depth) * self.batch.room;
        let places = self.batch.places(&lengths).map(|place| start + place);
        let blocks: Vec<BlockCopy> = if self.holds_content {
            let from = operation.buffers().map(|(seed, _)| offset_of(seed, origin));
            blocks(from, places, &lengths)
        } else {
            let from: Vec<u64> = Layout::InOrder.offsets(lengths.iter().copied()).collect();
            for ((_, buffer), from) in operation.buffers().zip(&from) {
                region[*from as usize..][..buffer.len()].copy_from_slice(buffer);
            }
            blocks(from, places, &lengths)
        };
        let moving = self.channel.write(&self.remote).blocks_from(region, &blocks);
        self.sent += 1;
        let first = operation.buffers().next().map_or(0, |(seed, _)| seed);
        let words = [first].into_iter().chain(lengths).take(self.batch.words());
        Ok((moving, words.flat_map(u64::to_le_bytes).collect()))
    }

    /// Moves an operation's blocks and its header, and waits until the blocks are there.
    pub(super) async fn send(&mut self, operation: &Operation, origin: u64) -> Result<(), CallError> {
        let (moving, header) = self.start_blocks(operation, origin)?;
        self.header.start_bytes(&header)?;
        Ok(keep(&mut self.region, moving.await)?)
    }
}

/// Puts the region that an operation had into `place`, whether it succeeded or not.
pub(super) fn keep(
    place: &mut Option<MemRegion>,
    result: Result<MemRegion, MemcpyError>,
) -> Result<(), ChannelError> {
    let (region, result) = match result {
        Ok(region) => (region, Ok(())),
        Err(failed) => {
            let (region, error) = failed.into_parts();
            (region, Err(error))
        }
    };
    *place = Some(region);
    result
}

fn blocks(
    from: impl IntoIterator<Item = u64>,
    to: impl Iterator<Item = u64>,
    lengths: &[u64],
) -> Vec<BlockCopy> {
    let each = from.into_iter().zip(to).zip(lengths);
    each.map(|((local, remote), length)| BlockCopy { local, remote, length: *length }).collect()
}

/// The number of the variant that `operation` carries, the first one's seed being `seed`.
pub(super) fn variant_of(seed: u64, operation: &Operation) -> usize {
    let first = operation.buffers().next().map_or(seed, |(seed, _)| seed);
    (0..VARIANTS).find(|it| variant_seed(seed, *it) == first).unwrap_or(0)
}

/// Registered copies of what `content` begins with in each of its variants.
fn regions(
    device: &RdmaDevice,
    content: &[u8],
    seed: u64,
    bytes: u64,
) -> Result<Vec<Option<MemRegion>>, CallError> {
    let bytes = length(bytes)?;
    let region = |variant| {
        let start = length(offset_of(variant_seed(seed, variant), seed))?;
        let mut region = device.allocate(bytes)?;
        region.copy_from_slice(&content[start..start + bytes]);
        Ok(Some(region))
    };
    (0..VARIANTS).map(region).collect()
}

/// Tensors in a registered copy of `content`: one of each length, for each variant.
fn tensors(content: &[u8], seed: u64, lengths: &Arc<[u64]>) -> Result<Vec<Vec<Tensor>>, CallError> {
    let bytes = content.len() as u64;
    // The pool rounds up.
    let pool = Pool::for_sending(bytes.saturating_mul(2).saturating_add(4 << 20));
    let mut buffer = pool.allocate(content.len()).map_err(|_| CallError::Memory(bytes))?;
    buffer.copy_from_slice(content);
    let whole = Tensor::from_buffer(spec(bytes)?, buffer).map_err(local)?;
    let tensor = |(seed_of_tensor, length): (u64, &u64)| {
        let start = offset_of(seed_of_tensor, seed);
        whole.slice(start..start + length).map_err(local)
    };
    let variant = |variant| {
        let first = variant_seed(seed, variant);
        seeds_in_order(first, lengths).zip(&**lengths).map(tensor).collect()
    };
    (0..VARIANTS).map(variant).collect()
}

fn spec(bytes: u64) -> Result<tonic_rdma_tensor::TensorSpec, CallError> {
    geometry::spec(bytes).map_err(local)
}

fn length(bytes: u64) -> Result<usize, CallError> {
    usize::try_from(bytes).map_err(|_| CallError::Memory(bytes))
}

fn local(error: impl Into<TensorError>) -> CallError {
    CallError::Channel(ChannelError::Tensor(error.into()))
}
