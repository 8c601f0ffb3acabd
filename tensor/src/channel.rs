//! Channels: one queue pair to one peer.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tonic::transport::Channel as Grpc;

use super::link::token::Token;
use super::link::{Arrivals, End, Link, Owner};
use super::memcpy::Memcpy;
use super::proto::tensor_device_client::TensorDeviceClient;
use super::proto::{AttachReply, AttachRequest, Kind};
use super::region::{RemoteRegion, RemoteShared, Rights};
use super::tls::chain;
use super::{ChannelError, MemRegion, Notification};
use crate::wire::tensor_frame::Frame;
use tonic_rdma_verbs::internal::{
    CopyRange, CopyRanges, LocalMemory, Notice, RemotePlace, Transfer, TransferKind,
};
use tonic_rdma_verbs::{RemoteSegment, Rkey};

/// Which way [`Channel::memcpy`] moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Into the peer's memory: RDMA WRITE.
    LocalToRemote,
    /// Out of the peer's memory: RDMA READ.
    RemoteToLocal,
}

/// One of the stretches that [`Channel::memcpy_batch`] moves. All numbers are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset in the local region.
    pub local: u64,
    /// Offset in the remote region.
    pub remote: u64,
    /// How many.
    pub length: u64,
}

/// A channel to a peer's device: the paper's `Channel` (table 1). Operations of one channel happen in order; those of
/// different queue pairs side by side. Clones are the same channel.
#[derive(Clone)]
pub struct Channel {
    link: Arc<Link>,
    port: u32,
    control: Control,
}

/// The gRPC connection that the link was made over.
#[derive(Clone)]
pub(super) struct Control {
    pub(super) endpoint: Arc<str>,
    pub(super) client: TensorDeviceClient<Grpc>,
    pub(super) patience: Duration,
}

impl Channel {
    pub(super) fn new(link: Arc<Link>, control: Control) -> Self {
        Self { link, port: 0, control }
    }

    /// The same peer by another queue pair.
    pub(super) fn on(&self, qp_index: u32) -> Self {
        let port = qp_index % self.link.ports().count().max(1) as u32;
        Self { port, ..self.clone() }
    }

    pub(super) fn link(&self) -> &Arc<Link> {
        &self.link
    }

    pub(super) fn port(&self) -> u32 {
        self.port
    }

    /// Returns where the peer's device listens.
    pub fn endpoint(&self) -> &str {
        &self.control.endpoint
    }

    /// Returns provider and name of the RDMA device, such as `soft` and `soft0`.
    pub fn device(&self) -> (&'static str, &str) {
        (self.link.provider(), self.link.device())
    }

    /// Returns how each end learns of arrivals.
    pub fn notification(&self) -> Notification {
        self.link.notification()
    }

    /// Returns whether the link to the peer still stands, as far as this end knows.
    pub fn is_open(&self) -> bool {
        self.link.fault().is_none()
    }

    /// Waits until the link ends, and returns the reason.
    pub async fn closed(&self) -> ChannelError {
        self.link.ended().await;
        self.link.fault().cloned().unwrap_or_else(|| ChannelError::Closed(Arc::clone(self.link.peer())))
    }

    /// Takes completions from this channel's queue, so that futures of this channel become ready in the middle of other
    /// work. The runtime does this by itself when it is idle.
    pub fn poll(&self) {
        self.link.poll(self.port);
    }

    /// Copies `length` bytes between `local_offset` of `local` and `remote_offset` of `remote` (table 1: `Memcpy`). The
    /// operation has begun when this returns, and goes on if the future is dropped. The region belongs to it until it ends,
    /// and comes back with the future's result.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{Direction, RdmaDevice, Rights};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let mut table = server.allocate(4096)?;
    /// # table.fill(3);
    /// # let exported = server.export("table", table, Rights::READ)?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("table").await?;
    /// let region = worker.allocate(1024)?;
    /// // 1024 bytes, from offset 512 of the peer's region to offset 0 of ours
    /// let (region, copied) = channel.memcpy(region, 0, &remote, 512, 1024, Direction::RemoteToLocal).await;
    /// copied?;
    /// assert!(region.iter().all(|&byte| byte == 3));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The future's result is an error if the bytes do not lie within both regions, the peer gave no right to do this, the
    /// region is another link's, or the link has failed. The region comes back in any case.
    pub fn memcpy(
        &self,
        local: MemRegion,
        local_offset: u64,
        remote: &RemoteRegion,
        remote_offset: u64,
        length: u64,
        direction: Direction,
    ) -> Memcpy {
        let block = Block { local: local_offset, remote: remote_offset, length };
        let blocks = CopyRanges::One(block.into());
        match self.check(&local, remote, std::slice::from_ref(&block), direction) {
            Ok(()) => self.start(local, remote, blocks, length, direction, false),
            Err(error) => Memcpy::refused(local, error),
        }
    }

    /// Copies as [`memcpy`](Self::memcpy) does, and calls `then` with the result instead of returning a future. The thread
    /// that polls the queue calls it, which is the runtime's own as a rule: `then` must not wait.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{Direction, RdmaDevice, Rights};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let exported = server.export("log", server.allocate(4096)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("log").await?;
    /// let (sender, done) = tokio::sync::oneshot::channel();
    /// let region = worker.allocate(1024)?;
    /// channel.memcpy_then(region, 0, &remote, 0, 1024, Direction::LocalToRemote, |region, result| {
    ///     let _ = sender.send((region, result));
    /// });
    /// let (_region, result) = done.await.expect("it is called once");
    /// result?;
    /// # Ok(())
    /// # }
    /// ```
    #[expect(clippy::too_many_arguments, reason = "the paper's")]
    pub fn memcpy_then(
        &self,
        local: MemRegion,
        local_offset: u64,
        remote: &RemoteRegion,
        remote_offset: u64,
        length: u64,
        direction: Direction,
        then: impl FnOnce(MemRegion, Result<(), ChannelError>) + Send + 'static,
    ) {
        let block = Block { local: local_offset, remote: remote_offset, length };
        if let Err(error) = self.check(&local, remote, std::slice::from_ref(&block), direction) {
            return then(local, Err(error));
        }
        let token = Token::call(move |outcome| {
            if let LocalMemory::Region(region) = outcome.local {
                then(region, outcome.result);
            }
        });
        let blocks = CopyRanges::One(block.into());
        let transfer =
            Transfer::new(LocalMemory::Region(local), way(direction), blocks, remote.shared.place, token);
        // A refusal is told as any other end is.
        let _ = self.link.port(self.port).submit(transfer, length, way(direction));
    }

    /// Copies many blocks at once, thousands of them as paged caches need it, with one completion. They happen in their order;
    /// those that follow one another at both ends become one. With `notify`, which a write may have, the peer gets a notice
    /// when all of them are there ([`ExportedRegion::notice`](super::ExportedRegion::notice)).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{Block, Direction, RdmaDevice, Rights};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let cache = server.export("cache", server.allocate(1 << 20)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("cache").await?;
    /// let pages = worker.allocate(2 * 4096)?;
    /// let blocks = [
    ///     Block { local: 0, remote: 40_960, length: 4096 },
    ///     Block { local: 4096, remote: 8192, length: 4096 },
    /// ];
    /// let (_pages, copied) = channel.memcpy_batch(pages, &remote, &blocks, Direction::LocalToRemote, true).await;
    /// copied?;
    /// cache.notice().await?; // at the peer: both pages are there
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`memcpy`](Self::memcpy), and if a read is to notify.
    pub fn memcpy_batch(
        &self,
        local: MemRegion,
        remote: &RemoteRegion,
        blocks: &[Block],
        direction: Direction,
        notify: bool,
    ) -> Memcpy {
        let checked =
            self.check(&local, remote, blocks, direction).and_then(|()| match (notify, direction) {
                (true, Direction::RemoteToLocal) => {
                    Err(ChannelError::local("only a write can notify the peer"))
                }
                _ => Ok(()),
            });
        if let Err(error) = checked {
            return Memcpy::refused(local, error);
        }
        let length = blocks.iter().map(|block| block.length).sum();
        let blocks = CopyRanges::Many(blocks.iter().map(|block| (*block).into()).collect());
        self.start(local, remote, blocks, length, direction, notify)
    }

    fn start(
        &self,
        local: MemRegion,
        remote: &RemoteRegion,
        blocks: CopyRanges,
        length: u64,
        direction: Direction,
        notify: bool,
    ) -> Memcpy {
        let (memcpy, token) = Memcpy::new(Arc::clone(&self.link), self.port);
        let port = self.link.port(self.port);
        let transfer = |token| {
            Transfer::new(LocalMemory::Region(local), way(direction), blocks, remote.shared.place, token)
        };
        if !notify {
            let _ = port.submit(transfer(token), length, way(direction));
            return memcpy;
        }
        let end = &remote.shared.end;
        // Held until the notice is in the queue, so that counts are written in order.
        let mut told = super::lock(&remote.shared.told);
        *told += 1;
        let token = token.ring(&self.link, end, *told, self.port);
        let word = || self.link.peer_count(end.peer_pair());
        // What is refused is told as any other end is.
        let _ = self.link.submit_noticed(transfer(token), length, end, *told, self.port, word);
        memcpy
    }

    fn check(
        &self,
        local: &MemRegion,
        remote: &RemoteRegion,
        blocks: &[Block],
        direction: Direction,
    ) -> Result<(), ChannelError> {
        if !Arc::ptr_eq(&remote.shared.link, &self.link) {
            return Err(ChannelError::local(format!("{:?} is a region of another link", remote.name())));
        }
        let (what, may) = match direction {
            Direction::LocalToRemote => ("write", remote.rights().write),
            Direction::RemoteToLocal => ("read", remote.rights().read),
        };
        if !may {
            return Err(ChannelError::NotPermitted { what, name: Arc::clone(&remote.shared.name) });
        }
        let available = local.len() as u64;
        for block in blocks {
            let Block { local: offset, length, .. } = *block;
            if offset.checked_add(length).is_none_or(|end| end > available) {
                return Err(ChannelError::OutOfRange { which: "local", offset, length, available });
            }
            remote.at(block.remote, length)?;
        }
        Ok(())
    }

    /// Looks up the peer's region of this name, and takes a right to it (§3.2: address distribution).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let exported = server.export("parameters", server.allocate(4096)?, Rights::READ)?;
    /// # let worker = RdmaDevice::new(1, 2, "127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let remote = channel.region("parameters").await?;
    /// assert_eq!((remote.len(), remote.rights()), (4096, Rights::READ));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The peer has none of this name, or something else under it.
    pub async fn region(&self, name: &str) -> Result<RemoteRegion, ChannelError> {
        let name = super::device::checked(name)?;
        let (ours, reply) = self.attach(&name, Kind::Region, Vec::new()).await?;
        let place = place_of(&reply)?;
        let owner = nobody();
        let end = Arc::new(ours.towards(reply.slot, owner));
        let rights = Rights { read: reply.readable, write: reply.writable };
        let link = Arc::clone(&self.link);
        let told = Mutex::new(reply.epoch);
        Ok(RemoteRegion { shared: Arc::new(RemoteShared { name, link, place, rights, end, told }) })
    }

    /// Attaches to what the peer offers under `name`: takes a pair of words here, and asks for the peer's.
    pub(super) async fn attach(
        &self,
        name: &Arc<str>,
        kind: Kind,
        metadata: Vec<u8>,
    ) -> Result<(Arc<End>, AttachReply), ChannelError> {
        let owner = nobody();
        // What the peer's pair is, its answer says; until then nothing is told to it.
        let ours = self.link.add_end(|pair| End::new(pair, u32::MAX, Arrivals::Count, owner))?;
        let request = AttachRequest {
            link: self.link.id().to_vec().into(),
            name: name.to_string(),
            kind: kind.into(),
            metadata: metadata.into(),
            words: ours.pair(),
            queue_pair: self.port,
        };
        let mut client = self.control.client.clone();
        let answer = tokio::time::timeout(self.control.patience, client.attach(request)).await;
        let reply = match answer {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(self.refused(&status)),
            Err(_) => Err(ChannelError::TimedOut { what: "the peer's answer", limit: self.control.patience }),
        };
        match reply {
            Ok(reply) => Ok((ours, reply)),
            Err(error) => {
                self.link.remove_end(&ours);
                Err(error)
            }
        }
    }

    /// What the peer's status means here.
    fn refused(&self, status: &tonic::Status) -> ChannelError {
        if let Some(fault) = self.link.fault() {
            return fault.clone();
        }
        refused(&self.control.endpoint, status)
    }
}

/// The owner of what nobody waits for.
pub(super) fn nobody() -> Weak<dyn Owner> {
    struct Nobody;
    impl Owner for Nobody {
        fn link_ended(&self, _: &ChannelError) {}
    }
    Weak::<Nobody>::new()
}

/// What a status of a peer's means.
pub(super) fn refused(endpoint: &Arc<str>, status: &tonic::Status) -> ChannelError {
    // Of a connection that could not be made, or has ended, the status itself says little.
    let message = match std::error::Error::source(status) {
        Some(cause) => format!("{}: {}", status.message(), chain(cause)),
        None => status.message().to_owned(),
    };
    ChannelError::Refused { endpoint: Arc::clone(endpoint), code: status.code(), message: message.into() }
}

/// The memory that the peer gave us a right to.
pub(super) fn place_of(reply: &AttachReply) -> Result<RemotePlace, ChannelError> {
    let place = reply.place.ok_or_else(|| ChannelError::local("the peer named no memory"))?;
    let start = RemoteSegment { address: place.address, rkey: Rkey(place.rkey) };
    Ok(RemotePlace { start, length: place.length })
}

fn way(direction: Direction) -> TransferKind {
    match direction {
        Direction::LocalToRemote => TransferKind::Write,
        Direction::RemoteToLocal => TransferKind::Read,
    }
}

impl From<Block> for CopyRange {
    fn from(block: Block) -> Self {
        Self { local: block.local, remote: block.remote, length: block.length }
    }
}

impl Link {
    /// Submits a write, at the end of which the peer is told that `epoch` has arrived at `end`: by a word, where the peer
    /// sees `word`, with the write's completion, or by a frame behind it.
    pub(super) fn submit_noticed(
        &self,
        transfer: Transfer<Token>,
        length: u64,
        end: &End,
        epoch: u64,
        port: u32,
        word: impl FnOnce() -> Option<RemoteSegment>,
    ) -> Result<(), ChannelError> {
        let (slot, port) = (end.peer_pair(), self.port(port));
        match self.notification() {
            Notification::Word => match word() {
                Some(place) => {
                    port.submit(transfer.notify(Notice::Word(place, epoch)), length, TransferKind::Write)
                }
                None => Err(self.fail(self.violation("it has no such words"))),
            },
            Notification::Immediate => {
                port.submit(transfer.notify(Notice::Immediate(slot)), length, TransferKind::Write)
            }
            Notification::Message => {
                port.submit(transfer, length, TransferKind::Write)?;
                port.send_frame(&Frame::Placed { slot, epoch })
            }
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("link", &self.link).field("port", &self.port).finish_non_exhaustive()
    }
}
