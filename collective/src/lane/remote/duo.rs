//! Two ranks of this process, for benches.

use tonic_rdma_tensor::RdmaDevice;

use crate::error::CollectiveError;
use crate::lane::remote::{LaneKind, LaneSettings, RemoteLanes};
use crate::lane::{Lanes, Tag};
use crate::memory::{Memory, MemoryPool};

/// One of two ranks, with the lanes between them.
pub struct Duo {
    lanes: RemoteLanes,
    memory: Memory,
    peer: usize,
    sent: u64,
    _device: RdmaDevice,
}

impl Duo {
    /// Makes two ranks, which see one another by views if `views`. References are to memory of `bytes` bytes.
    ///
    /// # Errors
    /// The devices or the lanes can't be made.
    pub async fn open(views: bool, bytes: usize) -> Result<[Self; 2], CollectiveError> {
        let first = RdmaDevice::builder().bind("127.0.0.1:0").await?;
        let second = RdmaDevice::builder().bind("127.0.0.1:0").await?;
        let to_second = first.channel(&second.endpoint(), 0).await?;
        let to_first = second.channel(&first.endpoint(), 0).await?;
        let kind = if views { LaneKind::Auto } else { LaneKind::Write };
        let settings = LaneSettings { kind, ..LaneSettings::default() };
        let pools = [&first, &second].map(|device| MemoryPool::new(device, MemoryPool::KEPT));
        let (ours, theirs) = tokio::try_join!(
            RemoteLanes::open(vec![None, Some(to_second)], 0, &pools[0], 0, &settings),
            RemoteLanes::open(vec![Some(to_first), None], 1, &pools[1], 0, &settings),
        )?;
        let memories = [pools[0].take(bytes)?, pools[1].take(bytes)?];
        let [memory, other] = memories;
        Ok([
            Self { lanes: ours, memory, peer: 1, sent: 0, _device: first },
            Self { lanes: theirs, memory: other, peer: 0, sent: 0, _device: second },
        ])
    }

    /// Returns whether messages go by views.
    pub fn is_view(&self) -> bool {
        self.lanes.viewed().count() == 1
    }

    /// Sends `payload` inline. Returns false if there is no room.
    ///
    /// # Errors
    /// The lane has failed.
    #[inline]
    pub fn send(&mut self, payload: &[u8]) -> Result<bool, CollectiveError> {
        let sent = self.lanes.send(self.peer, self.tag(), payload).map_err(failed)?;
        self.sent += u64::from(sent);
        Ok(sent)
    }

    /// Sends a reference to the first bytes of the memory. Returns false if there is no room.
    ///
    /// # Errors
    /// The lane has failed.
    pub fn refer(&mut self, length: usize) -> Result<bool, CollectiveError> {
        let tag = self.tag();
        let sent = self.lanes.send_reference(self.peer, tag, &self.memory, 0, length).map_err(failed)?;
        self.sent += u64::from(sent.is_some());
        Ok(sent.is_some())
    }

    /// Receives the next message into `into`, and returns whether it was there.
    ///
    /// # Errors
    /// The lane has failed.
    #[inline]
    pub fn receive(&mut self, into: &mut [u8]) -> Result<bool, CollectiveError> {
        if self.lanes.peek(self.peer).map_err(failed)?.is_none() {
            self.lanes.progress().map_err(failed)?;
            return Ok(false);
        }
        self.lanes.receive_into(self.peer, into).map_err(failed)
    }

    fn tag(&self) -> Tag {
        Tag { operation: self.sent, step: 0, call: 1 }
    }
}

#[cold]
fn failed(error: crate::lane::LaneError) -> CollectiveError {
    CollectiveError::Setup(format!("the lane to rank {}: {:?}", error.rank, error.cause).into())
}

impl std::fmt::Debug for Duo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Duo").field("sent", &self.sent).finish_non_exhaustive()
    }
}
