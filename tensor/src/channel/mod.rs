//! Channels: operations on the memory of one peer, over one queue pair.

mod attach;
pub(crate) mod copy;
pub(crate) mod memcpy;
mod view;

use std::fmt;
use std::sync::Arc;

use crate::channel::copy::{RegionRead, RegionWrite};
use crate::control::peer_service::PeerService;
use crate::error::ChannelError;
use crate::exchange::Requests;
use crate::link::Link;
use crate::link::notification::Notification;
use crate::regions::remote::RemoteRegion;

/// A channel to a peer's device: the paper's `Channel` (table 1). Operations of one channel happen in order. Operations of
/// different queue pairs happen side by side. All clones refer to one channel.
#[derive(Clone)]
pub struct Channel {
    link: Arc<Link>,
    requests: Arc<Requests>,
    port: u32,
    service: PeerService,
}

impl Channel {
    pub(crate) fn new(link: Arc<Link>, requests: Arc<Requests>, service: PeerService) -> Self {
        Self { link, requests, port: 0, service }
    }

    /// Returns a channel to this peer over another queue pair.
    pub(crate) fn on(&self, qp_index: u32) -> Self {
        let port = qp_index % self.link.ports().count().max(1) as u32;
        Self { port, ..self.clone() }
    }

    /// Returns where the peer's device listens.
    pub fn endpoint(&self) -> &str {
        &self.service.endpoint
    }

    /// Returns provider and name of the RDMA device, such as `soft` and `soft0`.
    pub fn device(&self) -> (&'static str, &str) {
        (self.link.provider, &self.link.device)
    }

    /// Returns how each end learns of arrivals.
    pub fn notification(&self) -> Notification {
        self.link.notification
    }

    /// Returns the number of bytes that [`RegionWrite::bytes`] takes at most.
    pub fn max_inline(&self) -> usize {
        self.link.port(self.port).inline
    }

    /// Returns whether the link to the peer still stands, as far as this end knows.
    pub fn is_open(&self) -> bool {
        self.link.fault().is_none()
    }

    /// Waits until the link ends, and returns the reason.
    pub async fn closed(&self) -> ChannelError {
        self.link.ended().await;
        self.link.fault().cloned().unwrap_or_else(|| ChannelError::Closed(Arc::clone(&self.link.peer)))
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
        RegionWrite::new(&self.link, self.port, remote)
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
        RegionRead::new(&self.link, self.port, remote)
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("link", &self.link).field("port", &self.port).finish_non_exhaustive()
    }
}
