//! Channels: one queue pair to one peer.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tonic::transport::Channel as Grpc;

use super::copy::{RegionRead, RegionWrite};
use super::link::{Arrivals, End, Link, Owner};
use super::proto::tensor_device_client::TensorDeviceClient;
use super::proto::{AttachReply, AttachRequest, Kind};
use super::region::{RemoteRegion, RemoteShared, Rights};
use super::tls::chain;
use super::{ChannelError, Notification};
use tonic_rdma_verbs::internal::RemotePlace;
use tonic_rdma_verbs::{RemoteSegment, Rkey};

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

    /// Begins to describe a write to `remote`: the offset there, and the bytes here. [`RegionWrite`] has more.
    ///
    /// ```no_run
    /// # async fn write(
    /// #     channel: tonic_rdma_tensor::Channel,
    /// #     remote: tonic_rdma_tensor::RemoteRegion,
    /// #     block: tonic_rdma_tensor::MemRegion,
    /// # ) -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// let block = channel.write(&remote).at(8192).from(block, ..4096).await?;
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    pub fn write<'a>(&'a self, remote: &'a RemoteRegion) -> RegionWrite<'a> {
        RegionWrite::new(self, remote)
    }

    /// Begins to describe a read from `remote`: the offset there, and the place for the bytes here. [`RegionRead`] has
    /// more.
    ///
    /// ```no_run
    /// # async fn read(
    /// #     channel: tonic_rdma_tensor::Channel,
    /// #     remote: tonic_rdma_tensor::RemoteRegion,
    /// #     block: tonic_rdma_tensor::MemRegion,
    /// # ) -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// let block = channel.read(&remote).at(8192).into(block, ..4096).await?;
    /// # drop(block);
    /// # Ok(())
    /// # }
    /// ```
    pub fn read<'a>(&'a self, remote: &'a RemoteRegion) -> RegionRead<'a> {
        RegionRead::new(self, remote)
    }

    /// Looks up the peer's region of this name, and takes a right to it (§3.2: address distribution).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let exported = server.export("parameters", server.allocate(4096)?, Rights::READ)?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("link", &self.link).field("port", &self.port).finish_non_exhaustive()
    }
}
