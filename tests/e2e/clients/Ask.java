import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Java's own client with its defaults: it offers HTTP/2 by an Upgrade, and keeps its connection. */
public class Ask {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var body = HttpRequest.BodyPublishers.ofString(arguments[1]);
        var request = HttpRequest.newBuilder(URI.create(arguments[0])).header("content-type", "application/json").POST(body).build();
        for (int attempt = 0; attempt < 3; attempt++) {
            var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
            if (answer.statusCode() != 200) System.exit(1);
        }
    }
}
