//! Whether the device of a client answers. A server finds that out before it spends a thread and memory on the client.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::OnceCell;
use tokio::time::{sleep, timeout};

use crate::endpoint::error::RdmaUnavailable;
use crate::endpoint::lock::lock;
use crate::endpoint::provider::Provider;
use tonic_rdma_verbs::internal::{DeviceOwner, SoftDevice};
use tonic_rdma_verbs::{QueuePairAddress, VerbsError};

/// The devices that one client has named. A device is asked once, however many queue pairs of it the client offers.
#[derive(Debug, Default)]
pub struct Devices {
    asked: HashMap<SoftDevice, Arc<Answer>>,
}

/// The answer of a device, which all clients that name the device wait for.
type Answer = OnceCell<Result<DeviceOwner, Arc<VerbsError>>>;

/// The devices that are asked now, by any client of this process.
static ASKED: LazyLock<Mutex<HashMap<SoftDevice, Weak<Answer>>>> = LazyLock::new(Mutex::default);

impl Devices {
    /// Waits until the device of the queue pair at `address` has answered, and returns its owner. Returns `None` for
    /// other providers, because they connect queue pairs without asking the peer's device.
    ///
    /// # Errors
    /// The device does not answer in time, can't be found, or is of a user that this process does not let in.
    pub async fn ask(
        &mut self,
        provider: Provider,
        address: &QueuePairAddress,
    ) -> Result<Option<DeviceOwner>, RdmaUnavailable> {
        if provider != Provider::Soft {
            return Ok(None);
        }
        let device = SoftDevice::of(address)?;
        let answer = self.asked.entry(device).or_insert_with(|| shared(device));
        let answer = answer.get_or_init(async || ask(device).await.map_err(Arc::new)).await;
        answer.clone().map(Some).map_err(RdmaUnavailable::setup)
    }
}

fn shared(device: SoftDevice) -> Arc<Answer> {
    let mut asked = lock(&ASKED);
    if let Some(answer) = asked.get(&device).and_then(Weak::upgrade) {
        return answer;
    }
    asked.retain(|_, answer| answer.strong_count() > 0);
    let answer = Arc::default();
    asked.insert(device, Arc::downgrade(&answer));
    answer
}

#[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
async fn ask(device: SoftDevice) -> Result<DeviceOwner, VerbsError> {
    /// Times between two tries to connect to a device that takes no connection.
    const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
    let failed = |cause: io::Error| VerbsError::Os { action: "asking the peer's device".into(), cause };
    let answered = async {
        let mut pause = PAUSES[0];
        let ping = loop {
            if let Some(ping) = device.ping()? {
                break ping;
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES[1]);
        };
        let owner = ping.owner();
        #[allow(
            deprecated,
            reason = "the ping returns one open descriptor, which it owns, for as long as it lives"
        )]
        let ping = AsyncFd::with_interest(ping, Interest::READABLE).map_err(failed)?;
        // A device that hangs up has answered, too. Connecting to its queue pair finds the reason.
        drop(ping.readable().await.map_err(failed)?);
        Ok(owner)
    };
    let patience = SoftDevice::PATIENCE;
    timeout(patience, answered).await.unwrap_or_else(|_| {
        Err(VerbsError::Unreachable(format!("the peer's device did not answer within {patience:?}")))
    })
}
