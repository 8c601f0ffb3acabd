//! Interceptors and tower layers around both ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use support::until;
use tonic::service::Routes;
use tonic::service::interceptor::{InterceptedService, InterceptorLayer};
use tonic::{Request, Response, Status};
use tower::ServiceBuilder;
use tower::util::MapRequestLayer;

use crate::caller::Caller;
use crate::column::Column;
use crate::content::{check, code, joined, message, name};
use crate::probe::Probe;
use crate::watch::Watch;

type Http = http::Request<tonic::body::Body>;

/// Returns a service that answers with the header `stamp`.
fn stamped() -> Probe {
    Probe::new().unary(async |request| {
        let stamp = request.metadata().get("stamp").map(|value| value.to_str().unwrap().to_owned());
        Ok(Response::new(stamp.unwrap_or_default().into()))
    })
}

fn text(reply: &Bytes) -> String {
    String::from_utf8(reply.to_vec()).unwrap()
}

pub(crate) async fn an_interceptor_of_the_client(column: Column) -> String {
    let running = column.serve(stamped()).await;
    let channel = column.connect(running.endpoint()).await.unwrap();
    let adding = InterceptedService::new(channel.clone(), |mut request: Request<()>| {
        request.metadata_mut().insert("stamp", "added".parse().unwrap());
        Ok(request)
    });
    let refusing = InterceptedService::new(channel, |_: Request<()>| {
        Err::<Request<()>, _>(Status::failed_precondition("not sent"))
    });
    let added = Caller::new(adding).echo("").await.unwrap();
    let status = Caller::new(refusing).echo("").await.unwrap_err();
    joined([format!("adds: {}", text(&added)), format!("refuses: {} {:?}", name(&status), status.message())])
}

pub(crate) async fn an_interceptor_of_the_server(column: Column) -> String {
    let guard = |mut request: Request<()>| {
        if request.metadata().get("token").is_none() {
            return Err(Status::unauthenticated("no token"));
        }
        request.metadata_mut().insert("stamp", "seen".parse().unwrap());
        Ok(request)
    };
    let running = column.serve_layered(InterceptorLayer::new(guard), Routes::new(stamped())).await;
    let mut client = column.client(&running).await;
    let status = client.echo(message(1, 100_000)).await.unwrap_err();
    let mut request = Request::new(Bytes::new());
    request.metadata_mut().insert("token", "sesame".parse().unwrap());
    let accepted = client.unary(request).await.unwrap().into_inner();
    joined([
        format!("refuses: {} {:?}", name(&status), status.message()),
        format!("adds: {}", text(&accepted)),
    ])
}

pub(crate) async fn a_layer_of_the_server(column: Column) -> String {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let layer = MapRequestLayer::new(move |mut request: Http| {
        let number = 1 + counted.fetch_add(1, Ordering::SeqCst);
        let path = format!("{number} {} {}", request.method(), request.uri().path());
        request.headers_mut().insert("stamp", path.parse().unwrap());
        request
    });
    let running = column.serve_layered(layer, Routes::new(stamped())).await;
    let mut client = column.client(&running).await;
    let mut replies = Vec::new();
    for _ in 0..2 {
        replies.push(text(&client.echo("").await.unwrap()));
    }
    joined(replies)
}

pub(crate) async fn layers_of_the_client(column: Column) -> String {
    let running = column.serve(stamped()).await;
    let channel = column.connect(running.endpoint()).await.unwrap();
    let channel = ServiceBuilder::new()
        .map_request(|mut request: Http| {
            request.headers_mut().insert("stamp", http::HeaderValue::from_static("mapped"));
            request
        })
        .concurrency_limit(2)
        .service(channel);
    let mut caller = Caller::new(channel);
    joined([text(&caller.echo("").await.unwrap()), text(&caller.echo("").await.unwrap())])
}

pub(crate) async fn a_timeout_layer_of_the_client(column: Column) -> String {
    let watch = Watch::default();
    let handlers = watch.clone();
    let probe = Probe::new().unary(move |_| {
        let guard = handlers.begin();
        async move {
            std::future::pending::<()>().await;
            drop(guard);
            Err(Status::internal("a pending future ended"))
        }
    });
    let running = column.serve(probe).await;
    let channel = column.connect(running.endpoint()).await.unwrap();
    let channel = ServiceBuilder::new().timeout(Duration::from_millis(100)).service(channel);
    let ended = Caller::new(channel).echo("").await.unwrap_err();
    watch.until_ended().await;
    joined([format!("timed out: {}", ended.message().contains("timed out")), "the handler ends".to_owned()])
}

pub(crate) async fn a_limit_of_the_server(column: Column) -> String {
    let most = Arc::new(AtomicUsize::new(0));
    let (running, counted) = (Arc::<AtomicUsize>::default(), Arc::clone(&most));
    let probe = Probe::new().unary(move |request| {
        let (running, counted) = (Arc::clone(&running), Arc::clone(&counted));
        counted.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        async move {
            // On a busy machine the first handler could end before the second one begins, and a third has
            // time to begin beside them.
            until(|| counted.load(Ordering::SeqCst) >= 2).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(Response::new(request.into_inner()))
        }
    });
    let layer = tower::limit::GlobalConcurrencyLimitLayer::new(2);
    let running = column.serve_layered(layer, Routes::new(probe)).await;
    let client = column.client(&running).await;
    let calls: Vec<_> = (0..10)
        .map(|seed| {
            let mut client = client.clone();
            tokio::spawn(async move { check(&client.echo(message(seed, 700)).await.unwrap(), seed, 700) })
        })
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    joined([code(Ok::<_, Status>(())), format!("{} at once", most.load(Ordering::SeqCst))])
}
