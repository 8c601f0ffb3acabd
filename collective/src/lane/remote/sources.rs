//! Regions of a peer that references name. Each is attached when a message names it for the first time.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tonic_rdma_tensor::{Channel, ChannelError, RegionView, RemoteRegion};

use crate::lane::{LaneFault, violation};
use crate::memory::name_of;

/// The attached regions of one peer, the one that was used last first.
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
    attaching: Option<(u64, oneshot::Receiver<Result<Source, ChannelError>>)>,
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
            Ok(Ok(source)) => source,
            Ok(Err(ChannelError::Refused { message, .. })) => {
                return Err(violation(format!(
                    "it refers to its memory {attaching}, and refuses: {message}"
                )));
            }
            Ok(Err(error)) => return Err(LaneFault::Lost(error)),
            Err(_) => {
                // The runtime has ended.
                return Err(LaneFault::Lost(ChannelError::Closed(self.channel.endpoint().into())));
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
            let late = ChannelError::TimedOut { what: "the attachment of a rank's memory", limit };
            // The lanes may be gone.
            let _ = sender.send(attached.unwrap_or(Err(late)));
        });
        self.attaching = Some((number, receiver));
    }
}

async fn attach(channel: &Channel, name: &str, views: bool) -> Result<Source, ChannelError> {
    let region = channel.region(name).await?;
    if views && let Some(view) = channel.view(&region).await? {
        return Ok(Source::View(view, region));
    }
    Ok(Source::Remote(region))
}
