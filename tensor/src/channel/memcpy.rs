//! The future of a copy between a region here and memory of the peer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::error::ChannelError;
use crate::error::TransferError;
use crate::link::Link;
use crate::link::token::{Outcome, OutcomeCell, Token};
use tonic_rdma_verbs::internal::LocalMemory;
use tonic_rdma_verbs::memory::MemRegion;

/// A copy between a region here and memory of the peer, which has begun: the paper's `Memcpy` (table 1). As a future it yields
/// the region that had moved in. Dropping it cancels nothing: the device frees the memory when the copy has ended.
///
/// The methods that return it are [`RegionWrite::from`](crate::RegionWrite::from),
/// [`RegionRead::into`](crate::RegionRead::into) and [`StaticSender::start_region`](crate::StaticSender::start_region), which
/// have examples.
#[derive(Debug)]
#[must_use = "the region comes back with it"]
pub struct Memcpy {
    progress: Progress,
}

#[derive(Debug)]
enum Progress {
    Ended(Option<Result<MemRegion, TransferError>>),
    Running { outcome: Arc<OutcomeCell>, link: Arc<Link>, port: u32 },
}

impl Memcpy {
    /// Makes the future of a copy that did not begin.
    pub(crate) fn refused(region: MemRegion, error: ChannelError) -> Self {
        Self { progress: Progress::Ended(Some(Err(TransferError::new(region, error)))) }
    }

    /// Makes the future of a copy that has ended already.
    pub(crate) fn done(region: MemRegion) -> Self {
        Self { progress: Progress::Ended(Some(Ok(region))) }
    }

    /// Makes the future of a transfer, and the token that goes with the transfer.
    pub(crate) fn new(link: Arc<Link>, port: u32) -> (Self, Token) {
        let outcome = Arc::new(OutcomeCell::default());
        let token = Token::future(&outcome);
        (Self { progress: Progress::Running { outcome, link, port } }, token)
    }

    /// Takes the region if the copy has ended, without waiting. Takes completions from the queue to find out.
    pub fn try_take(&mut self) -> Option<Result<MemRegion, TransferError>> {
        match &mut self.progress {
            Progress::Ended(result) => result.take(),
            Progress::Running { outcome, link, port } => {
                let found = outcome.take().or_else(|| {
                    link.poll(*port);
                    outcome.take()
                });
                found.and_then(result_of)
            }
        }
    }

    /// Calls `then` with the result instead of waiting for it. The thread that polls the queue calls `then`, as a rule the
    /// thread of the runtime, so `then` must not wait.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tonic_rdma_tensor::ChannelError> {
    /// # use tonic_rdma_tensor::{RdmaDevice, Rights};
    /// # let server = RdmaDevice::builder().bind("127.0.0.1:0").await?;
    /// # let exported = server.export("log", server.allocate(4096)?, Rights::WRITE)?;
    /// # let worker = RdmaDevice::builder().bind("127.0.0.1:0").await?;
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
            Progress::Ended(Some(result)) => then(result),
            Progress::Ended(None) => {}
            Progress::Running { outcome, .. } => outcome.call(move |outcome| {
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
        if let Some(result) = self.try_take() {
            return Poll::Ready(result);
        }
        // A long copy goes on with each poll of the queue.
        if let Progress::Running { outcome, link, port } = &self.progress
            && link.spin(*port, || outcome.is_over())
            && let Some(result) = self.try_take()
        {
            return Poll::Ready(result);
        }
        match &self.progress {
            Progress::Ended(_) => Poll::Pending,
            Progress::Running { outcome, .. } => match outcome.poll(context).map(result_of) {
                Poll::Ready(Some(result)) => Poll::Ready(result),
                Poll::Ready(None) | Poll::Pending => Poll::Pending,
            },
        }
    }
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
