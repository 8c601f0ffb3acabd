//! What the clones of a channel share: the endpoints, and the choice among them.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::runtime::Handle;
use tonic::transport::Endpoint;

use super::connection::{Connection, Dialling, Target};
use super::error::ChannelError;
use crate::endpoint::Dialer;
use crate::grpc::calls::CallConfig;
use crate::transport::balance::keep::Kept;
use crate::transport::balance::table::Table;

/// The endpoints of a channel.
#[derive(Debug)]
pub(super) struct Endpoints {
    pub(super) table: Arc<Table<Connection>>,
    pub(super) dialling: Arc<Dialling>,
    /// The runtime of the channel.
    pub(super) runtime: Handle,
    /// Dropping these ends the tasks of the endpoints.
    _kept: Vec<Kept<Connection>>,
}

impl Endpoints {
    /// Makes the endpoints of a channel. If the channel `balances` its calls, its endpoints stay connected without calls.
    pub(super) fn new(endpoints: Vec<Endpoint>, balances: bool, dialer: Dialer, calls: CallConfig) -> Self {
        let dialling = Arc::new(Dialling { dialer, calls, last: Mutex::default() });
        let targets = endpoints.into_iter().map(|endpoint| (Target::new(endpoint, &dialling), None));
        Self::keep(targets.collect(), balances, &dialling)
    }

    /// Makes the endpoints of a channel, and connects to the endpoint, or to at least one of several.
    ///
    /// # Errors
    /// There is no endpoint, or none can be connected to.
    pub(super) async fn connected(
        endpoints: Vec<Endpoint>,
        balances: bool,
        dialer: Dialer,
        calls: CallConfig,
    ) -> Result<Self, ChannelError> {
        match &endpoints[..] {
            [] => Err(ChannelError::NoEndpoint),
            [one] if !balances => {
                let dialling = Arc::new(Dialling { dialer, calls, last: Mutex::default() });
                let target = Target::new(one.clone(), &dialling);
                let first = Arc::new(target.connect().await?);
                Ok(Self::keep(vec![(target, Some(first))], balances, &dialling))
            }
            _ => {
                let connecting = Self::new(endpoints, balances, dialer, calls);
                connecting
                    .table
                    .connection(Instant::now(), || {})
                    .await
                    .map_err(ChannelError::Unavailable)?;
                Ok(connecting)
            }
        }
    }

    fn keep(
        targets: Vec<(Arc<Target>, Option<Arc<Connection>>)>,
        balances: bool,
        dialling: &Arc<Dialling>,
    ) -> Self {
        let (table, runtime) = (Table::new(!balances), Handle::current());
        let kept = targets.into_iter().map(|(target, first)| {
            Kept::new(&table, &runtime, target.endpoint.uri().clone(), first, move || {
                let target = Arc::clone(&target);
                async move { target.connect().await }
            })
        });
        let kept = kept.collect();
        Self { table, dialling: Arc::clone(dialling), runtime, _kept: kept }
    }

    /// Returns the native connection of the only endpoint, if there is one. It may refuse the call, which can be sent again then.
    pub(super) fn only_native(&self) -> Option<Arc<Connection>> {
        self.table.only().filter(|connection| connection.is_native())
    }
}
