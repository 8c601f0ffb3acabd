//! Views of the peer's regions.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::channel::Channel;
use crate::error::ChannelError;
use crate::regions::remote::RemoteRegion;
use tonic_rdma_verbs::{NoView, RemoteView};

/// The longest wait for the peer's memory.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time after which memory that has not come is asked for again.
const AGAIN: Duration = Duration::from_millis(600);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(1);

impl Channel {
    /// Returns a view of the peer's region, if this device maps memory of the peer: the software device, if both processes belong
    /// to one user and share their memory. Returns `None` for a network card, for a peer of another user, and if the bounds on mapped
    /// memory are reached. The first view of a region takes some milliseconds, and two seconds at most: a READ of a few bytes makes
    /// the peer offer its memory.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let channel = worker.channel(&server.endpoint(), 0).await?;
    /// let board = server.export("board", server.allocate(4096)?, Rights::READ)?; // at the peer
    ///
    /// let remote = channel.region("board").await?;
    /// if let Some(view) = channel.view(&remote).await? {
    ///     board.memory().store_u64(8, 77)?; // at the peer
    ///     assert_eq!(view.load_u64(8)?, 77);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`NotPermitted`](ChannelError::NotPermitted) without the right to read, [`TimedOut`](ChannelError::TimedOut) if the peer does not
    /// serve the READ, and other errors if the peer has withdrawn the region, the region belongs to another link, or the link has
    /// failed.
    pub async fn view(&self, remote: &RemoteRegion) -> Result<Option<RemoteView>, ChannelError> {
        let shared = &remote.shared;
        if !Arc::ptr_eq(&shared.link, &self.link) {
            return Err(ChannelError::local(format!("{:?} is a region of another link", remote.name())));
        }
        if !remote.rights().read {
            return Err(ChannelError::NotPermitted { what: "read", name: Arc::clone(&shared.name) });
        }
        let deadline = Instant::now() + PATIENCE;
        let mut asked: Option<Instant> = None;
        loop {
            self.link.check()?;
            let place = shared.place;
            let view = self.link.port(self.port).with_queue_pair(|pair| pair.view(place.start, place.length));
            match view {
                Some(Ok(view)) => return Ok(Some(view)),
                Some(Err(NoView::Never)) => return Ok(None),
                Some(Err(NoView::Revoked)) => {
                    let name = remote.name();
                    return Err(ChannelError::local(format!("the peer has withdrawn the region {name:?}")));
                }
                // `None`: the link has just ended.
                None | Some(Err(NoView::NotYet)) => {}
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            if asked.is_none_or(|asked| asked.elapsed() >= AGAIN) {
                asked = Some(Instant::now());
                let late =
                    |_| ChannelError::TimedOut { what: "a read of the peer's region", limit: PATIENCE };
                timeout_at(deadline, self.ask_for_memory(remote)).await.map_err(late)??;
            } else {
                sleep(LOOK).await;
            }
        }
    }

    /// Reads a few bytes of the region. The peer's device serves this READ, and offers the memory to this device.
    async fn ask_for_memory(&self, remote: &RemoteRegion) -> Result<(), ChannelError> {
        let few = remote.len().min(8);
        let landing = &self.link.landing;
        let region = self.read(remote).into(landing.take(few)?, ..few as usize).await?;
        landing.put(region);
        Ok(())
    }
}
