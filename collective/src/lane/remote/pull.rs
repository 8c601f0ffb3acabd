//! Pulls: the bytes of a reference, piece by piece, and the regions of a peer in which they lie.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::time::error::Elapsed;

use crate::lane::remote::message::{LaneCounters, Reference};
use crate::lane::{LaneFault, violation};
use crate::memory::name_of;
use tonic_rdma_tensor::{
    Channel, MemRegion, Memcpy, RdmaDevice, RegionView, RemoteRegion, TensorError, TensorErrorKind, unstable,
};

/// The state of the pull of one peer's message, and memory for READs, which later pulls use again.
pub(super) struct Pull {
    device: RdmaDevice,
    /// The most bytes of one call, and of one READ.
    piece: usize,
    /// The most READs at once.
    ahead: usize,
    /// Bytes that READs were begun for.
    asked: usize,
    /// Bytes of the message that were given.
    pub(super) given: usize,
    reads: VecDeque<(Memcpy, usize)>,
    idle: Vec<MemRegion>,
    /// Since when the peer's memory is gone.
    gone: Option<Instant>,
}

/// How long the memory of a peer may be gone before that is the peer's fault. A peer that was killed is gone too, and its channel
/// closes a moment later: that is the better reason.
const GONE: Duration = Duration::from_secs(1);

/// The receiver of bytes.
pub(super) enum Sink<'a> {
    /// Takes pieces: the offset in the message, and the bytes.
    Pieces(&'a mut dyn FnMut(usize, &[u8])),
    /// Memory for the whole message.
    Memory(&'a mut [u8]),
}

impl Pull {
    pub(super) fn new(device: RdmaDevice, piece: usize, ahead: usize) -> Self {
        Self {
            device,
            piece,
            ahead,
            asked: 0,
            given: 0,
            reads: VecDeque::new(),
            idle: Vec::new(),
            gone: None,
        }
    }

    /// Begins anew, for the next message.
    pub(super) fn reset(&mut self) {
        (self.asked, self.given) = (0, 0);
        self.gone = None;
    }

    /// Gives the next bytes from a view. Returns whether all bytes were given.
    pub(super) fn give_from_view(
        &mut self,
        view: &RegionView,
        reference: Reference,
        sink: &mut Sink<'_>,
        scratch: &mut Scratch,
    ) -> Result<bool, LaneFault> {
        let (start, length) = range(reference, view.len() as u64)?;
        let count = self.piece.min(length - self.given);
        let outside = |_| out_of_range(reference, view.len() as u64);
        match sink {
            Sink::Memory(into) => {
                if let Some(into) = into.get_mut(self.given..self.given + count) {
                    view.copy_out(start + self.given, into).map_err(outside)?;
                }
            }
            Sink::Pieces(then) => {
                scratch.pieces(
                    count,
                    |at, piece| view.copy_out(start + self.given + at, piece).map_err(outside),
                    |at, piece| then(self.given + at, piece),
                )?;
            }
        }
        self.given += count;
        let ended = self.given == length;
        if ended && !view.is_current() {
            if self.gone.get_or_insert_with(Instant::now).elapsed() > GONE {
                return Err(violation("it withdrew memory while this rank read it"));
            }
            return Ok(false);
        }
        Ok(ended)
    }

    /// Gives the next bytes that READs have brought, and begins further READs. Returns whether all bytes were given.
    pub(super) fn give_from_remote(
        &mut self,
        channel: &Channel,
        remote: &RemoteRegion,
        reference: Reference,
        sink: &mut Sink<'_>,
        counters: &mut LaneCounters,
    ) -> Result<bool, LaneFault> {
        let (start, length) = range(reference, remote.len())?;
        self.read_ahead(channel, remote, start, length)?;
        let Some((read, count)) = self.reads.front_mut() else { return Ok(self.given == length) };
        let (result, count) = (read.try_take(), *count);
        let Some(result) = result else { return Ok(false) };
        self.reads.pop_front();
        let region = result.map_err(TensorError::from)?;
        let bytes = region.get(..count).unwrap_or_default();
        match sink {
            Sink::Pieces(then) => then(self.given, bytes),
            Sink::Memory(into) => {
                counters.copied_bytes += count as u64;
                if let Some(into) = into.get_mut(self.given..self.given + count) {
                    into.copy_from_slice(bytes);
                }
            }
        }
        self.given += count;
        self.idle.push(region);
        self.read_ahead(channel, remote, start, length)?;
        Ok(self.given == length)
    }

    fn read_ahead(
        &mut self,
        channel: &Channel,
        remote: &RemoteRegion,
        start: usize,
        length: usize,
    ) -> Result<(), LaneFault> {
        while self.asked < length && self.reads.len() < self.ahead {
            let count = self.piece.min(length - self.asked);
            let region = match self.idle.pop() {
                Some(region) => region,
                None => self.device.allocate(self.piece)?,
            };
            let read = channel.read(remote).at((start + self.asked) as u64).into(region, ..count);
            self.reads.push_back((read, count));
            self.asked += count;
        }
        Ok(())
    }
}

/// Returns the offset and length of a reference, if it lies within a region of `available` bytes.
fn range(reference: Reference, available: u64) -> Result<(usize, usize), LaneFault> {
    let Reference { offset, length, .. } = reference;
    if offset.checked_add(length).is_none_or(|end| end > available) {
        return Err(out_of_range(reference, available));
    }
    match (usize::try_from(offset), usize::try_from(length)) {
        (Ok(offset), Ok(length)) => Ok((offset, length)),
        _ => Err(out_of_range(reference, available)),
    }
}

#[cold]
fn out_of_range(reference: Reference, available: u64) -> LaneFault {
    let Reference { number, offset, length } = reference;
    violation(format!(
        "it refers to {length} bytes at offset {offset} of its memory {number} of {available} bytes"
    ))
}

/// The regions of one peer that references name, the one that was used last first. Each is attached when a message names it for the first time.
pub(super) struct Sources {
    channel: Channel,
    /// The number of the peer's pool.
    pool: u64,
    /// Whether to look at regions by views.
    views: bool,
    most: usize,
    limit: Duration,
    runtime: Handle,
    pub(super) attached: Vec<(u64, Source)>,
    attaching: Option<(u64, oneshot::Receiver<Result<Result<Source, TensorError>, Elapsed>>)>,
}

/// A region of the peer.
pub(super) enum Source {
    View(RegionView, #[expect(dead_code, reason = "its drop ends the attachment")] RemoteRegion),
    Remote(RemoteRegion),
}

impl Source {
    /// Returns false if it is known that the peer has withdrawn the region.
    pub(super) fn is_current(&self) -> bool {
        match self {
            Self::View(view, _) => view.is_current(),
            Self::Remote(_) => true,
        }
    }
}

impl Sources {
    /// Makes an empty list of at most `most` regions. Must be called within a tokio runtime.
    pub(super) fn new(channel: Channel, pool: u64, views: bool, most: usize, limit: Duration) -> Self {
        let runtime = Handle::current();
        Self { channel, pool, views, most, limit, runtime, attached: Vec::new(), attaching: None }
    }

    /// Returns the region of this number, or `None` while it is being attached.
    ///
    /// # Errors
    /// The peer has no such region, or the link to it has failed.
    pub(super) fn find(&mut self, number: u64) -> Result<Option<&Source>, LaneFault> {
        let known = self.attached.iter().position(|(known, _)| *known == number);
        let known = match known {
            Some(known) => known,
            None if !self.attach(number)? => return Ok(None),
            None => 0,
        };
        self.attached[..=known].rotate_right(1);
        Ok(self.attached.first().map(|(_, source)| source))
    }

    /// Forgets regions that the peer has withdrawn, so that their memory is freed there.
    pub(super) fn sweep(&mut self) {
        self.attached.retain(|(_, source)| source.is_current());
    }

    /// Goes on to attach the region, and returns whether it is attached now, in the first place.
    fn attach(&mut self, number: u64) -> Result<bool, LaneFault> {
        let Some((attaching, result)) = &mut self.attaching else {
            self.begin(number);
            return Ok(false);
        };
        let (attaching, result) = (*attaching, result.try_recv());
        if matches!(result, Err(TryRecvError::Empty)) {
            return Ok(false);
        }
        self.attaching = None;
        let source = match result {
            Ok(Ok(Ok(source))) => source,
            Ok(Ok(Err(error))) if error.kind() == TensorErrorKind::Refused => {
                let message = unstable::detail(&error);
                return Err(violation(format!(
                    "it refers to its memory {attaching}, and refuses: {message}"
                )));
            }
            Ok(Ok(Err(error))) => return Err(error.into()),
            Ok(Err(_)) => {
                let late =
                    format!("the attachment of a rank's memory did not happen within {:?}", self.limit);
                return Err(LaneFault::Lost(late.into()));
            }
            Err(_) => {
                let ended = format!("the link to {} was closed here", self.channel.endpoint());
                return Err(LaneFault::Lost(ended.into()));
            }
        };
        self.sweep();
        self.attached.truncate(self.most.saturating_sub(1));
        self.attached.insert(0, (attaching, source));
        Ok(attaching == number)
    }

    fn begin(&mut self, number: u64) {
        let (sender, receiver) = oneshot::channel();
        let (channel, name) = (self.channel.clone(), name_of(self.pool, number));
        let (views, limit) = (self.views, self.limit);
        self.runtime.spawn(async move {
            let attached = tokio::time::timeout(limit, attach(&channel, &name, views)).await;
            // The lanes may be gone.
            let _ = sender.send(attached);
        });
        self.attaching = Some((number, receiver));
    }
}

async fn attach(channel: &Channel, name: &str, views: bool) -> Result<Source, TensorError> {
    let region = channel.region(name).await?;
    if views && let Some(view) = channel.view(&region).await? {
        return Ok(Source::View(view, region));
    }
    Ok(Source::Remote(region))
}

/// Bytes of the buffer. They fit the first-level cache together with the data of a reduction.
const PIECE: usize = 8 << 10;

/// A buffer through which bytes of a peer pass, because the peer may change them at any time.
pub(super) struct Scratch {
    piece: Box<Piece>,
}

#[repr(align(64))]
struct Piece([u8; PIECE]);

impl Scratch {
    pub(super) fn new() -> Self {
        Self { piece: Box::new(Piece([0; PIECE])) }
    }

    /// Passes `length` bytes to `then` piece by piece, with their offset. `copy` fills a piece from an offset.
    #[inline]
    pub(super) fn pieces<E>(
        &mut self,
        length: usize,
        copy: impl Fn(usize, &mut [u8]) -> Result<(), E>,
        mut then: impl FnMut(usize, &[u8]),
    ) -> Result<(), E> {
        let mut done = 0;
        while done < length {
            let piece = &mut self.piece.0[..PIECE.min(length - done)];
            copy(done, piece)?;
            then(done, piece);
            done += piece.len();
        }
        Ok(())
    }
}
