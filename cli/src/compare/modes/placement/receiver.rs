//! The task that receives the tensors of one mode.

use tokio::sync::{mpsc, oneshot};
use tonic_rdma_tensor::ChannelError;

use super::record::Record;
use super::sink::Sink;

#[derive(Debug)]
pub(super) enum ReceiverCommand {
    Begin { every_byte: bool, begun: oneshot::Sender<()> },
    End { ended: oneshot::Sender<Result<Record, ChannelError>> },
}

/// Receives tensors in the turns of a mode. The task ends when its command channel is closed.
pub(super) async fn receive(mut sink: Sink, awaits: bool, mut commands: mpsc::Receiver<ReceiverCommand>) {
    while let Some(command) = commands.recv().await {
        // An end without a begin, or a second begin, gets no answer.
        let ReceiverCommand::Begin { every_byte, begun } = command else { continue };
        sink.begin(every_byte);
        let _ = begun.send(());
        let goes_on = match awaits {
            true => await_turn(&mut sink, &mut commands).await,
            false => poll_turn(&mut sink, &mut commands).await,
        };
        if !goes_on {
            return;
        }
    }
}

/// Receives by polling until the turn ends. Returns false if the command channel is closed.
async fn poll_turn(sink: &mut Sink, commands: &mut mpsc::Receiver<ReceiverCommand>) -> bool {
    let mut result = Ok(());
    loop {
        if result.is_ok() {
            result = sink.poll();
        }
        let command = match (&result, sink.yield_timer.is_due()) {
            (Ok(()), false) => continue,
            (Ok(()), true) => {
                sink.yield_timer.yield_now().await;
                commands.try_recv()
            }
            // Nothing can arrive after an error.
            (Err(_), _) => commands.recv().await.ok_or(mpsc::error::TryRecvError::Disconnected),
        };
        match command {
            Ok(ReceiverCommand::End { ended }) => {
                let _ = ended.send(result.map(|()| sink.record()));
                return true;
            }
            Ok(ReceiverCommand::Begin { .. }) | Err(mpsc::error::TryRecvError::Empty) => {}
            Err(mpsc::error::TryRecvError::Disconnected) => return false,
        }
    }
}

/// Receives by futures until the turn ends. Returns false if the command channel is closed.
async fn await_turn(sink: &mut Sink, commands: &mut mpsc::Receiver<ReceiverCommand>) -> bool {
    let mut result = Ok(());
    loop {
        let command = tokio::select! {
            biased;
            received = sink.recv(), if result.is_ok() => {
                result = received;
                continue;
            }
            command = commands.recv() => command,
        };
        match command {
            Some(ReceiverCommand::End { ended }) => {
                let _ = ended.send(result.map(|()| sink.record()));
                return true;
            }
            Some(ReceiverCommand::Begin { .. }) => {}
            None => return false,
        }
    }
}
