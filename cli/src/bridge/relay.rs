//! One connection, from the client's arrival to the end of both directions.

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use super::meters::{Failed, Meters};
use super::pump::{Broken, Pump};
use super::stream::Stream;

/// Why a connection ended before its time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("from client to target, {0}")]
    Up(Broken),
    #[error("from target to client, {0}")]
    Down(Broken),
    #[error("the client's end failed: {0}")]
    Client(io::Error),
    #[error("the target's end failed: {0}")]
    Target(io::Error),
}

/// Carries bytes both ways until both directions have ended. After an error, and when dropped, both ends are reset.
pub(crate) async fn relay(mut client: Stream, mut target: Stream, meters: &Meters) -> Result<(), Ended> {
    let open = meters.opened(client.carried_by(), target.carried_by());
    let mut up = Pump::new(meters.up.clone());
    let mut down = Pump::new(meters.down.clone());
    let carried = poll_fn(|context| {
        let up = up.poll(context, &mut client, &mut target).map_err(Ended::Up)?;
        let down = down.poll(context, &mut target, &mut client).map_err(Ended::Down)?;
        if up.is_ready() && down.is_ready() {
            return Poll::Ready(Ok(()));
        }
        watch(context, &mut client, &mut target)?;
        Poll::Pending
    });
    let carried = match carried.await {
        Ok(()) => poll_fn(|context| delivered(context, &mut client, &mut target)).await,
        Err(ended) => Err(ended),
    };
    match carried {
        Ok(()) => {
            drop(open);
            client.close();
            target.close();
        }
        Err(_) => meters.failed(Failed::Broken),
    }
    carried
}

/// Hears of an end that failed while neither of its directions had anything to do.
fn watch(context: &mut Context<'_>, client: &mut Stream, target: &mut Stream) -> Result<(), Ended> {
    let _: Poll<()> = client.poll_delivered(context).map_err(Ended::Client)?;
    let _: Poll<()> = target.poll_delivered(context).map_err(Ended::Target)?;
    Ok(())
}

/// Both directions have ended; what was written may still be on its way.
fn delivered(context: &mut Context<'_>, client: &mut Stream, target: &mut Stream) -> Poll<Result<(), Ended>> {
    let client = client.poll_delivered(context).map_err(Ended::Client)?;
    let target = target.poll_delivered(context).map_err(Ended::Target)?;
    if client.is_ready() && target.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
}
