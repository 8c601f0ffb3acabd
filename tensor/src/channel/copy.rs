//! Copies between a region here and a region of the peer: writes and reads, of one range or of many blocks.

use std::future::Future;
use std::io::IoSlice;
use std::ops::{Bound, RangeBounds};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::error::{TensorError, TransferError};
use crate::link::Link;
use crate::link::port::{Outcome, OutcomeCell, Token};
use crate::regions::RemoteRegion;
use tonic_rdma_verbs::memory::MemRegion;
use tonic_rdma_verbs::unstable::{self, CopyRanges, LocalMemory, Transfer, TransferKind, lock};

/// One block of [`RegionWrite::blocks_from`] or [`RegionRead::blocks_into`]. All numbers are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Offset in the local region.
    pub local: u64,
    /// Offset in the remote region, counted from the offset of the operation.
    pub remote: u64,
    /// Length of the block.
    pub length: u64,
}

/// A write to a region of the peer, from [`Channel::write`](crate::Channel::write): [`from`](Self::from)
/// begins the RDMA WRITE.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
/// # use tonic_rdma_tensor::{RdmaDevice, Rights};
/// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let exported = server.export("cache", server.allocate(1 << 20)?, Rights::READ_WRITE)?;
/// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let channel = worker.channel(&server.endpoint(), 0).await?;
/// let remote = channel.region("cache").await?;
/// let mut block = worker.allocate(16 << 10)?;
/// block.fill(7);
/// // The first 4096 bytes of the block, to offset 8192 of the peer's region.
/// let block = channel.write(&remote).at(8192).from(block, ..4096).await?;
/// # drop(block);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is written until `from` or `blocks_from`"]
pub struct RegionWrite<'a> {
    target: CopyTarget<'a>,
    notify: bool,
}

/// A read from a region of the peer, from [`Channel::read`](crate::Channel::read): [`into`](Self::into)
/// begins the RDMA READ.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
/// # use tonic_rdma_tensor::{RdmaDevice, Rights};
/// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let mut table = server.allocate(4096)?;
/// # table.fill(3);
/// # let exported = server.export("table", table, Rights::READ)?;
/// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
/// # let channel = worker.channel(&server.endpoint(), 0).await?;
/// let remote = channel.region("table").await?;
/// let region = worker.allocate(1024)?;
/// // 1024 bytes from offset 512 of the peer's region.
/// let region = channel.read(&remote).at(512).into(region, ..).await?;
/// assert!(region.iter().all(|&byte| byte == 3));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is read until `into` or `blocks_into`"]
pub struct RegionRead<'a> {
    target: CopyTarget<'a>,
}

/// Memory of the peer, and the channel to it.
#[derive(Clone, Copy, Debug)]
struct CopyTarget<'a> {
    link: &'a Arc<Link>,
    port: u32,
    remote: &'a RemoteRegion,
    offset: u64,
}

impl<'a> RegionWrite<'a> {
    pub(crate) fn new(link: &'a Arc<Link>, port: u32, remote: &'a RemoteRegion) -> Self {
        Self { target: CopyTarget { link, port, remote, offset: 0 }, notify: false }
    }

    /// Sets the offset in the peer's region, in bytes. Default: 0.
    pub fn at(mut self, offset: u64) -> Self {
        self.target.offset = offset;
        self
    }

    /// Sets whether the peer gets a notice ([`ExportedRegion::notice`](crate::ExportedRegion::notice)) when
    /// all bytes are there. Default: no.
    ///
    /// ```no_run
    /// # async fn write(
    /// #     channel: tonic_rdma_tensor::Channel,
    /// #     remote: tonic_rdma_tensor::RemoteRegion,
    /// #     block: tonic_rdma_tensor::MemRegion,
    /// # ) -> Result<(), tonic_rdma_tensor::TensorError> {
    /// let block = channel.write(&remote).notify(true).from(block, ..).await?;
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    pub fn notify(mut self, notify: bool) -> Self {
        self.notify = notify;
        self
    }

    /// Writes `range` of `region`. Unless it is refused, the operation has begun when this returns, and
    /// continues if the future is dropped. The region belongs to the operation until it ends, and comes back
    /// with the result of the future.
    ///
    /// # Errors
    /// The future yields a [`TransferError`](crate::TransferError), which has the region, if the bytes are
    /// not within both regions, the peer gave no right to write, the remote region belongs to another link,
    /// or the link has failed.
    pub fn from(self, region: MemRegion, range: impl RangeBounds<usize>) -> Memcpy {
        match one_block(&region, range) {
            Ok(block) => self.target.start(region, &[block], TransferKind::Write, self.notify),
            Err(error) => Memcpy::refused(region, error),
        }
    }

    /// Writes many blocks of `region` in one operation, such as thousands of pages of a cache. The blocks are
    /// written in the order of the list. Blocks that follow one another at both sides become one request.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// # use tonic_rdma_tensor::{BlockCopy, RdmaDevice, Rights};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let cache = server.export("cache", server.allocate(1 << 20)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("cache").await?;
    /// let pages = worker.allocate(2 * 4096)?;
    /// let blocks = [
    ///     BlockCopy { local: 0, remote: 40_960, length: 4096 },
    ///     BlockCopy { local: 4096, remote: 8192, length: 4096 },
    /// ];
    /// let _pages = channel.write(&remote).notify(true).blocks_from(pages, &blocks).await?;
    /// cache.notice().await?; // at the peer: both pages are there
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The errors of [`from`](Self::from).
    pub fn blocks_from(self, region: MemRegion, blocks: &[BlockCopy]) -> Memcpy {
        self.target.start(region, blocks, TransferKind::Write, self.notify)
    }

    /// Writes `parts`, one after the other, inline: the device copies the bytes before this function returns,
    /// so they need no region. Use it for small messages. All parts together have at most
    /// [`Channel::max_inline`](crate::Channel::max_inline) bytes. Nothing reports the end of the write. Later
    /// operations of this channel on the peer's memory happen after it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::io::IoSlice;
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let mailbox = server.export("mailbox", server.allocate(4096)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("mailbox").await?;
    /// let parts = [IoSlice::new(b"step "), IoSlice::new(b"17")];
    /// channel.write(&remote).at(64).notify(true).bytes(&parts)?;
    ///
    /// mailbox.notice().await?; // at the peer: the bytes are there
    /// let mut text = [0; 7];
    /// mailbox.memory().copy_out(64, &mut text)?;
    /// assert_eq!(&text, b"step 17");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Nothing was written, and no notice is sent to the peer:
    /// - [`Busy`](crate::TensorErrorKind::Busy) if the queue is full, or other operations wait for it. Try
    ///   again after a [poll](crate::Channel::poll).
    /// - [`InvalidArgument`](crate::TensorErrorKind::InvalidArgument), with the limit, if there are more
    ///   bytes than the device accepts inline.
    /// - [`NotPermitted`](crate::TensorErrorKind::NotPermitted) without the right to write,
    ///   [`InvalidArgument`](crate::TensorErrorKind::InvalidArgument) if the bytes are not within the peer's
    ///   region, or the region belongs to another link; the link's error if it has failed.
    pub fn bytes(self, parts: &[IoSlice<'_>]) -> Result<(), TensorError> {
        let CopyTarget { link, port, remote, offset } = self.target;
        link.check()?;
        self.target.check_right(TransferKind::Write)?;
        let length = parts.iter().map(|part| part.len()).fold(0, usize::saturating_add);
        let limit = link.port(port).inline;
        if length > limit {
            let name = remote.name();
            return Err(TensorError::argument(format!(
                "{length} bytes for the region {name:?}, but a write takes at most {limit} bytes inline: use a region"
            )));
        }
        let place = remote.at(offset, length as u64)?;
        if !self.notify {
            return link.port(port).write_now(parts, place, None);
        }
        // The lock is held until the notice is in the queue, so that counts are written in order.
        let mut notices = lock(&remote.shared.notices);
        link.write_noticed(parts, place, &remote.shared.pair, *notices + 1, port)?;
        *notices += 1;
        Ok(())
    }
}

impl<'a> RegionRead<'a> {
    pub(crate) fn new(link: &'a Arc<Link>, port: u32, remote: &'a RemoteRegion) -> Self {
        Self { target: CopyTarget { link, port, remote, offset: 0 } }
    }

    /// Sets the offset in the peer's region, in bytes. Default: 0.
    pub fn at(mut self, offset: u64) -> Self {
        self.target.offset = offset;
        self
    }

    /// Reads into `range` of `region`. Unless it is refused, the operation has begun when this returns, and
    /// continues if the future is dropped. The region belongs to the operation until it ends, and comes back
    /// with the result of the future.
    ///
    /// # Errors
    /// The future yields a [`TransferError`](crate::TransferError), which has the region, if the bytes are
    /// not within both regions, the peer gave no right to read, the remote region belongs to another link, or
    /// the link has failed.
    pub fn into(self, region: MemRegion, range: impl RangeBounds<usize>) -> Memcpy {
        match one_block(&region, range) {
            Ok(block) => self.target.start(region, &[block], TransferKind::Read, false),
            Err(error) => Memcpy::refused(region, error),
        }
    }

    /// Reads many blocks into `region` in one operation. Blocks that follow one another at both sides become
    /// one request.
    ///
    /// # Errors
    /// The errors of [`into`](Self::into).
    pub fn blocks_into(self, region: MemRegion, blocks: &[BlockCopy]) -> Memcpy {
        self.target.start(region, blocks, TransferKind::Read, false)
    }
}

impl CopyTarget<'_> {
    fn start(self, region: MemRegion, blocks: &[BlockCopy], kind: TransferKind, notify: bool) -> Memcpy {
        let checked = match self.check(&region, blocks, kind) {
            Ok(blocks) => blocks,
            Err(error) => return Memcpy::refused(region, error),
        };
        let Self { link, port: number, remote, .. } = self;
        let (memcpy, token) = Memcpy::new(Arc::clone(link), number);
        let transfer =
            |token| Transfer::new(LocalMemory::Region(region), kind, checked, remote.shared.place, token);
        if !notify {
            // If it is refused, the token gives the error to the `Memcpy`. `InFlight` splits it into
            // requests.
            let _ = link.port(number).submit(transfer(token));
            return memcpy;
        }
        let pair = &remote.shared.pair;
        // The lock is held until the notice is in the queue, so that counts are written in order.
        let mut notices = lock(&remote.shared.notices);
        *notices += 1;
        let token = token.with_bell(Arc::downgrade(link), pair, *notices, number);
        let word = || link.peer_count(pair.peer_number);
        // If it is refused, the token gives the error to the `Memcpy`.
        if link.submit_noticed(transfer(token), pair, *notices, number, word).is_err() {
            *notices -= 1;
        }
        memcpy
    }

    /// Returns the blocks with their offsets in the whole remote region, if the peer allows the operation and
    /// all bytes are within both regions.
    fn check(
        &self,
        region: &MemRegion,
        blocks: &[BlockCopy],
        kind: TransferKind,
    ) -> Result<CopyRanges, TensorError> {
        self.check_right(kind)?;
        match blocks {
            [block] => Ok(CopyRanges::One(self.check_block(region, block)?)),
            blocks => {
                let blocks = blocks.iter().map(|block| self.check_block(region, block));
                Ok(CopyRanges::Many(blocks.collect::<Result<_, _>>()?))
            }
        }
    }

    /// Fails if the region is one of another link, or the peer does not allow the operation.
    fn check_right(&self, kind: TransferKind) -> Result<(), TensorError> {
        let remote = self.remote;
        if !Arc::ptr_eq(&remote.shared.link, self.link) {
            return Err(TensorError::argument(format!("{:?} is a region of another link", remote.name())));
        }
        let (what, allowed) = match kind {
            TransferKind::Read => ("read", remote.rights().read),
            _ => ("write", remote.rights().write),
        };
        if !allowed {
            return Err(TensorError::not_permitted(what, &remote.shared.name));
        }
        Ok(())
    }

    fn check_block(&self, region: &MemRegion, block: &BlockCopy) -> Result<unstable::CopyRange, TensorError> {
        let BlockCopy { local, remote, length } = *block;
        let available = region.len() as u64;
        if local.checked_add(length).is_none_or(|end| end > available) {
            return Err(TensorError::out_of_range("local", local, length, available));
        }
        // An offset beyond the address space is outside every region.
        let remote = remote.saturating_add(self.offset);
        self.remote.at(remote, length)?;
        Ok(unstable::CopyRange { local, remote, length })
    }
}

/// Returns `range` of `region` as a block. The check of the block finds a range that exceeds the region.
fn one_block(region: &MemRegion, range: impl RangeBounds<usize>) -> Result<BlockCopy, TensorError> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => region.len(),
    };
    match end.checked_sub(start) {
        Some(length) => Ok(BlockCopy { local: start as u64, remote: 0, length: length as u64 }),
        None => Err(TensorError::argument(format!("the range {start}..{end} ends before it begins"))),
    }
}

/// A copy between a region here and memory of the peer, which has begun: the paper's `Memcpy` (table 1). As a
/// future it yields the region that had moved in. Dropping it cancels nothing: the device frees the memory
/// when the copy has ended.
///
/// The methods that return it are [`RegionWrite::from`](crate::RegionWrite::from),
/// [`RegionRead::into`](crate::RegionRead::into) and
/// [`StaticSender::try_send_region`](crate::StaticSender::try_send_region), which have examples.
#[derive(Debug)]
#[must_use = "the region comes back with it"]
pub struct Memcpy {
    progress: MemcpyState,
}

#[derive(Debug)]
enum MemcpyState {
    Ended(Option<Result<MemRegion, TransferError>>),
    Running { outcome: Arc<OutcomeCell>, link: Arc<Link>, port: u32 },
}

impl Memcpy {
    /// Makes the future of a copy that did not begin.
    pub(crate) fn refused(region: MemRegion, error: TensorError) -> Self {
        Self { progress: MemcpyState::Ended(Some(Err(TransferError::new(region, error)))) }
    }

    /// Makes the future of a copy that has ended already.
    pub(crate) fn done(region: MemRegion) -> Self {
        Self { progress: MemcpyState::Ended(Some(Ok(region))) }
    }

    /// Makes the future of a transfer, and the token that goes with the transfer.
    pub(crate) fn new(link: Arc<Link>, port: u32) -> (Self, Token) {
        let outcome = Arc::new(OutcomeCell::default());
        let token = Token::future(&outcome);
        (Self { progress: MemcpyState::Running { outcome, link, port } }, token)
    }

    /// Takes the region if the copy has ended, without waiting. Takes completions from the queue to find out.
    pub fn try_take(&mut self) -> Option<Result<MemRegion, TransferError>> {
        match &mut self.progress {
            MemcpyState::Ended(result) => result.take(),
            MemcpyState::Running { outcome, link, port } => {
                let found = outcome.take().or_else(|| {
                    link.poll(*port);
                    outcome.take()
                });
                found.and_then(result_of)
            }
        }
    }

    /// Calls `then` with the result instead of waiting for it. The thread that polls the queue calls `then`,
    /// as a rule the thread of the runtime, so `then` must not wait, and drop no runtime.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::TensorError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let exported = server.export("log", server.allocate(4096)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("log").await?;
    /// let (sender, done) = tokio::sync::oneshot::channel();
    /// let region = worker.allocate(1024)?;
    /// channel.write(&remote).from(region, ..).on_completion(|result| {
    ///     let _ = sender.send(result);
    /// });
    /// let _region = done.await.expect("it is called once")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_completion(self, then: impl FnOnce(Result<MemRegion, TransferError>) + Send + 'static) {
        match self.progress {
            MemcpyState::Ended(Some(result)) => then(result),
            MemcpyState::Ended(None) => {}
            MemcpyState::Running { outcome, .. } => outcome.call(move |outcome| {
                if let Some(result) = result_of(outcome) {
                    then(result);
                }
            }),
        }
    }
}

impl Future for Memcpy {
    type Output = Result<MemRegion, TransferError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match &mut self.progress {
            MemcpyState::Ended(result) => result.take(),
            MemcpyState::Running { outcome, link, port } => {
                ready!(poll_outcome(outcome, link, *port, context)).and_then(result_of)
            }
        };
        result.map_or(Poll::Pending, Poll::Ready)
    }
}

/// Is ready with the outcome of a transfer over `port` of `link` when the transfer has ended, unless another
/// thread has taken the outcome since.
pub(crate) fn poll_outcome(
    outcome: &OutcomeCell,
    link: &Link,
    port: u32,
    context: &Context<'_>,
) -> Poll<Option<Outcome>> {
    if let Some(found) = outcome.take() {
        return Poll::Ready(Some(found));
    }
    link.poll(port);
    // A long copy continues with each poll of the queue.
    if link.spin(port, || outcome.is_over()) {
        return Poll::Ready(outcome.take());
    }
    outcome.poll_over(context).map(|()| outcome.take())
}

fn result_of(outcome: Outcome) -> Option<Result<MemRegion, TransferError>> {
    match outcome.local {
        LocalMemory::Region(region) => Some(match outcome.result {
            Ok(()) => Ok(region),
            Err(error) => Err(TransferError::new(region, error)),
        }),
        _ => None,
    }
}
