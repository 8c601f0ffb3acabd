//! The making of a communicator.

use std::time::Duration;

use tonic_rdma::Config;

use super::Communicator;
use super::plans::PlanChoice;
use crate::error::CollectiveError;
use crate::group::{Group, Launch, Settings};

/// Settings of a communicator.
#[derive(Clone)]
pub struct CommunicatorBuilder {
    launch: Option<Launch>,
    pub(super) settings: Settings,
    pub(super) limit: Duration,
    /// `None` if the program sets none.
    pub(super) plans: Option<PlanChoice>,
}

impl Default for CommunicatorBuilder {
    fn default() -> Self {
        Self { launch: None, settings: Settings::default(), limit: Duration::from_secs(30), plans: None }
    }
}

impl CommunicatorBuilder {
    /// Takes rank, number of ranks and address from the environment that torchrun, Open MPI's mpirun or Slurm has set.
    ///
    /// # Errors
    /// See [`Launch::from_env`].
    pub fn from_env(self) -> Result<Self, CollectiveError> {
        Ok(self.launch(Launch::from_env()?))
    }

    /// Sets rank, number of ranks and address.
    pub fn launch(mut self, launch: Launch) -> Self {
        self.launch = Some(launch);
        self
    }

    /// Sets how long an operation may take. The default is 30 seconds.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets how the group chooses the plans of all operations. All ranks set the same. The default is that of the variable
    /// `RDMA_COLLECTIVE_PLANS`, or [`PlanChoice::Default`] without it.
    ///
    /// ```
    /// use tonic_rdma_collective::{Algorithm, Communicator, PlanChoice};
    ///
    /// let rings = PlanChoice::Fixed { algorithm: Algorithm::Ring, piece_bytes: 64 << 10 };
    /// let builder = Communicator::builder().plans(rings);
    /// ```
    pub fn plans(mut self, plans: PlanChoice) -> Self {
        self.plans = Some(plans);
        self
    }

    /// Sets how connections are made, and which RDMA device they use. The default is what the `RDMA_*` variables say
    /// ([`Config::from_env`]).
    pub fn config(mut self, config: Config) -> Self {
        self.settings.config = Some(config);
        self
    }

    /// Sets how long the ranks wait for one another at the start. The default is one minute.
    pub fn meeting(mut self, limit: Duration) -> Self {
        self.settings.meeting = limit;
        self
    }

    /// Sets how long a rank may take to answer a question of another. For tests on busy machines; the default is 100 ms.
    #[doc(hidden)]
    pub fn answer(mut self, limit: Duration) -> Self {
        self.settings.answer = limit;
        self
    }

    /// Sets the TLS of calls to other ranks.
    #[cfg(feature = "_tls-any")]
    pub fn client_tls(mut self, tls: tonic::transport::ClientTlsConfig) -> Self {
        self.settings.client_tls = Some(tls);
        self
    }

    /// Sets the TLS of this rank's server.
    #[cfg(feature = "_tls-any")]
    pub fn server_tls(mut self, tls: tonic::transport::ServerTlsConfig) -> Self {
        self.settings.server_tls = Some(tls);
        self
    }

    /// Meets the other ranks, and makes sure that all have the same plans of operations.
    ///
    /// # Errors
    /// - There is no launch, the ranks do not meet in time, or there is no RDMA to a rank.
    /// - The variable `RDMA_COLLECTIVE_PLANS` has a value that can't be read, or the ranks have different [`PlanChoice`]s.
    /// - A rank is lost, or does not answer. The error names the rank.
    pub async fn connect(mut self) -> Result<Communicator, CollectiveError> {
        if self.plans.is_none() {
            self.plans = Some(PlanChoice::from_env()?);
        }
        let Some(launch) = self.launch.clone() else {
            return Err(CollectiveError::Setup(
                "neither rank nor address are set; call from_env, or launch".into(),
            ));
        };
        let group = Group::join(launch, self.settings.clone()).await?;
        Communicator::first(group, self).await
    }
}

impl std::fmt::Debug for CommunicatorBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommunicatorBuilder")
            .field("launch", &self.launch)
            .field("limit", &self.limit)
            .field("plans", &self.plans)
            .finish_non_exhaustive()
    }
}
