//! Reads of element references: their bytes, chunk by chunk, and the regions of a peer in which they lie.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::link::remote::message::{ElementReference, LinkCounters};
use crate::link::{LinkFault, violation};
use crate::memory::name_of;
use tonic_rdma_tensor::{
    Channel, MemRegion, Memcpy, RdmaDevice, RegionView, RemoteRegion, TensorError, TensorErrorKind, unstable,
};

/// Reads the elements of one message after another from one peer. The memory of READs is reused. The queue pairs
/// take the READs in turn.
pub(super) struct ElementRead {
    device: RdmaDevice,
    /// One for each queue pair, that of the next READ first.
    channels: VecDeque<Channel>,
    /// The most bytes that one call delivers, and of one READ.
    chunk: usize,
    /// The most READs at once: one for each queue pair at least.
    ahead: usize,
    /// Bytes of the message for which READs were begun.
    requested: usize,
    /// Bytes of the message that were delivered.
    pub(super) delivered: usize,
    reads: VecDeque<(Memcpy, usize)>,
    idle: Vec<MemRegion>,
    /// Since when the peer's memory is gone.
    gone: Option<Instant>,
}

/// How long withdrawn memory is tolerated. The memory of a killed peer is withdrawn too, and soon its channel
/// closes, which is the better reason. After this time the peer is at fault.
const GONE: Duration = Duration::from_secs(1);

/// The receiver of bytes.
pub(super) enum Sink<'a> {
    /// Takes chunks: the offset in the message, and the bytes.
    Chunks(&'a mut dyn FnMut(usize, &[u8])),
    /// Memory for the whole message.
    Memory(&'a mut [u8]),
}

impl ElementRead {
    pub(super) fn new(device: RdmaDevice, channel: &Channel, chunk: usize, ahead: usize) -> Self {
        let channels: VecDeque<_> = (0..channel.queue_pairs()).map(|pair| channel.over(pair)).collect();
        Self {
            device,
            chunk,
            ahead: ahead.max(channels.len()),
            channels,
            requested: 0,
            delivered: 0,
            reads: VecDeque::new(),
            idle: Vec::new(),
            gone: None,
        }
    }

    /// Gets ready for the next message.
    pub(super) fn reset(&mut self) {
        (self.requested, self.delivered) = (0, 0);
        self.gone = None;
    }

    /// Passes to `sink` the next bytes of a view. Returns whether all bytes were delivered.
    pub(super) fn read_from_view(
        &mut self,
        view: &RegionView,
        reference: ElementReference,
        sink: &mut Sink<'_>,
        scratch: &mut Scratch,
    ) -> Result<bool, LinkFault> {
        let (start, length) = range(reference, view.len() as u64)?;
        let count = self.chunk.min(length - self.delivered);
        let outside = |_| out_of_range(reference, view.len() as u64);
        match sink {
            Sink::Memory(into) => {
                if let Some(into) = into.get_mut(self.delivered..self.delivered + count) {
                    view.copy_out(start + self.delivered, into).map_err(outside)?;
                }
            }
            Sink::Chunks(then) => {
                scratch.chunks(
                    count,
                    |at, chunk| view.copy_out(start + self.delivered + at, chunk).map_err(outside),
                    |at, chunk| then(self.delivered + at, chunk),
                )?;
            }
        }
        self.delivered += count;
        let ended = self.delivered == length;
        if ended && !view.is_current() {
            if self.gone.get_or_insert_with(Instant::now).elapsed() > GONE {
                return Err(violation("it withdrew memory while this rank read it"));
            }
            return Ok(false);
        }
        Ok(ended)
    }

    /// Passes to `sink` the next bytes that READs have brought, and begins further READs. Returns whether all
    /// bytes were delivered.
    pub(super) fn read_from_remote(
        &mut self,
        remote: &RemoteRegion,
        reference: ElementReference,
        sink: &mut Sink<'_>,
        counters: &mut LinkCounters,
    ) -> Result<bool, LinkFault> {
        let (start, length) = range(reference, remote.len())?;
        self.read_ahead(remote, start, length)?;
        let Some((read, count)) = self.reads.front_mut() else { return Ok(self.delivered == length) };
        let (result, count) = (read.try_take(), *count);
        let Some(result) = result else { return Ok(false) };
        self.reads.pop_front();
        let region = result.map_err(TensorError::from)?;
        let bytes = region.get(..count).unwrap_or_default();
        match sink {
            Sink::Chunks(then) => then(self.delivered, bytes),
            Sink::Memory(into) => {
                counters.copied_bytes += count as u64;
                if let Some(into) = into.get_mut(self.delivered..self.delivered + count) {
                    into.copy_from_slice(bytes);
                }
            }
        }
        self.delivered += count;
        self.idle.push(region);
        self.read_ahead(remote, start, length)?;
        Ok(self.delivered == length)
    }

    fn read_ahead(&mut self, remote: &RemoteRegion, start: usize, length: usize) -> Result<(), LinkFault> {
        while self.requested < length && self.reads.len() < self.ahead {
            let count = self.chunk.min(length - self.requested);
            let region = match self.idle.pop() {
                Some(region) => region,
                None => self.device.allocate(self.chunk)?,
            };
            self.channels.rotate_left(1);
            let Some(channel) = self.channels.back() else { return Ok(()) };
            let read = channel.read(remote).at((start + self.requested) as u64).into(region, ..count);
            self.reads.push_back((read, count));
            self.requested += count;
        }
        Ok(())
    }
}

/// Returns the offset and length of a reference, if it lies within a region of `available` bytes.
fn range(reference: ElementReference, available: u64) -> Result<(usize, usize), LinkFault> {
    let ElementReference { offset, length, .. } = reference;
    if offset.checked_add(length).is_none_or(|end| end > available) {
        return Err(out_of_range(reference, available));
    }
    match (usize::try_from(offset), usize::try_from(length)) {
        (Ok(offset), Ok(length)) => Ok((offset, length)),
        _ => Err(out_of_range(reference, available)),
    }
}

#[cold]
fn out_of_range(reference: ElementReference, available: u64) -> LinkFault {
    let ElementReference { number, offset, length } = reference;
    violation(format!(
        "it refers to {length} bytes at offset {offset} of its memory {number} of {available} bytes"
    ))
}

/// The regions of one peer that references name, the one that was used last first. Each is attached when a
/// message names it for the first time.
pub(super) struct PeerRegions {
    channel: Channel,
    /// The number of the peer's pool.
    pool: u64,
    /// Whether to map regions by views.
    views: bool,
    most: usize,
    limit: Duration,
    runtime: Handle,
    pub(super) attached: Vec<(u64, PeerRegion)>,
    attaching: Option<(u64, oneshot::Receiver<Result<PeerRegion, LinkFault>>)>,
}

/// A region of the peer.
pub(super) enum PeerRegion {
    View(RegionView, #[expect(dead_code, reason = "its drop ends the attachment")] RemoteRegion),
    Remote(RemoteRegion),
}

impl PeerRegion {
    /// Returns false if it is known that the peer has withdrawn the region.
    pub(super) fn is_current(&self) -> bool {
        match self {
            Self::View(view, _) => view.is_current(),
            Self::Remote(_) => true,
        }
    }
}

impl PeerRegions {
    /// Makes an empty list of at most `most` regions. Must be called within a tokio runtime.
    pub(super) fn new(channel: Channel, pool: u64, views: bool, most: usize, limit: Duration) -> Self {
        let runtime = Handle::current();
        Self { channel, pool, views, most, limit, runtime, attached: Vec::new(), attaching: None }
    }

    /// Returns the region of this number, or `None` while it is being attached.
    ///
    /// # Errors
    /// The peer has no such region, or the link to it has failed.
    pub(super) fn find(&mut self, number: u64) -> Result<Option<&PeerRegion>, LinkFault> {
        let known = self.attached.iter().position(|(known, _)| *known == number);
        let known = match known {
            Some(known) => known,
            None if !self.attach(number)? => return Ok(None),
            None => 0,
        };
        self.attached[..=known].rotate_right(1);
        Ok(self.attached.first().map(|(_, region)| region))
    }

    /// Forgets regions that the peer has withdrawn, so that their memory is freed there.
    pub(super) fn sweep(&mut self) {
        self.attached.retain(|(_, region)| region.is_current());
    }

    /// Begins or continues the attachment of region `number`. Returns true once it is at index 0.
    fn attach(&mut self, number: u64) -> Result<bool, LinkFault> {
        let Some((attaching, result)) = &mut self.attaching else {
            self.begin(number);
            return Ok(false);
        };
        let (attaching, result) = (*attaching, result.try_recv());
        if matches!(result, Err(TryRecvError::Empty)) {
            return Ok(false);
        }
        self.attaching = None;
        let region = result.unwrap_or_else(|_| {
            // The runtime has ended.
            let ended = format!("the link to {} was closed here", self.channel.endpoint());
            Err(LinkFault::Lost(ended.into()))
        })?;
        self.sweep();
        self.attached.truncate(self.most.saturating_sub(1));
        self.attached.insert(0, (attaching, region));
        Ok(attaching == number)
    }

    fn begin(&mut self, number: u64) {
        let (sender, receiver) = oneshot::channel();
        let (channel, name) = (self.channel.clone(), name_of(self.pool, number));
        let (views, limit) = (self.views, self.limit);
        self.runtime.spawn(async move {
            let attached = match tokio::time::timeout(limit, attach(&channel, &name, views)).await {
                Ok(Ok(region)) => Ok(region),
                Ok(Err(error)) if error.kind() == TensorErrorKind::Refused => {
                    let message = unstable::detail(&error);
                    Err(violation(format!("it refers to its memory {number}, and refuses: {message}")))
                }
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(LinkFault::Lost(
                    format!("the attachment of a rank's memory did not happen within {limit:?}").into(),
                )),
            };
            // The links may be gone.
            let _ = sender.send(attached);
        });
        self.attaching = Some((number, receiver));
    }
}

async fn attach(channel: &Channel, name: &str, views: bool) -> Result<PeerRegion, TensorError> {
    let region = channel.region(name).await?;
    if views && let Some(view) = view_of(channel, &region).await? {
        return Ok(PeerRegion::View(view, region));
    }
    Ok(PeerRegion::Remote(region))
}

/// Returns a view of the peer's region, if it can be mapped. A busy peer may take longer to show its memory than a
/// view waits, so this asks until the caller's time is over.
pub(super) async fn view_of(
    channel: &Channel,
    region: &RemoteRegion,
) -> Result<Option<RegionView>, TensorError> {
    loop {
        match channel.view(region).await {
            Err(error) if error.kind() == TensorErrorKind::Timeout => {}
            viewed => return viewed,
        }
    }
}

/// Bytes of the buffer. They fit the first-level cache together with the data of a reduction.
const CHUNK: usize = 8 << 10;

/// A buffer through which bytes of a peer pass, because the peer may change them at any time.
pub(super) struct Scratch {
    chunk: Box<Chunk>,
}

#[repr(align(64))]
struct Chunk([u8; CHUNK]);

impl Scratch {
    pub(super) fn new() -> Self {
        Self { chunk: Box::new(Chunk([0; CHUNK])) }
    }

    /// Passes `length` bytes to `then` chunk by chunk, with their offset. `copy` fills a chunk from an
    /// offset.
    #[inline]
    pub(super) fn chunks<E>(
        &mut self,
        length: usize,
        copy: impl Fn(usize, &mut [u8]) -> Result<(), E>,
        mut then: impl FnMut(usize, &[u8]),
    ) -> Result<(), E> {
        let mut done = 0;
        while done < length {
            let chunk = &mut self.chunk.0[..CHUNK.min(length - done)];
            copy(done, chunk)?;
            then(done, chunk);
            done += chunk.len();
        }
        Ok(())
    }
}
