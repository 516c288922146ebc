import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.metrics.Metrics;
import org.apache.kafka.common.metrics.internals.PluginMetricsImpl;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;
import org.apache.kafka.common.security.auth.KafkaPrincipal;
import org.apache.kafka.common.security.auth.SecurityProtocol;
import org.apache.kafka.metadata.authorizer.StandardAcl;
import org.apache.kafka.metadata.authorizer.StandardAuthorizer;
import org.apache.kafka.server.authorizer.Action;
import org.apache.kafka.server.authorizer.AuthorizableRequestContext;
import org.apache.kafka.server.authorizer.AuthorizationResult;

/**
 * Asks Apache Kafka's StandardAuthorizer. Lines of fields separated by tabs come in, one answer (0 or 1) for each
 * question goes out:
 *
 * <pre>
 * world super.users allow.everyone.if.no.acl.found     a new authorizer without rules
 * acl type pattern name principal host operation permission
 * ask principal host operation type name
 * any principal host operation type                    authorizeByResourceType
 * </pre>
 */
public final class AuthorizerOracle {
    private record Context(KafkaPrincipal principal, InetAddress clientAddress) implements AuthorizableRequestContext {
        public String listenerName() { return "L"; }
        public SecurityProtocol securityProtocol() { return SecurityProtocol.SASL_SSL; }
        public int requestType() { return 0; }
        public int requestVersion() { return 0; }
        public String clientId() { return ""; }
        public int correlationId() { return 0; }
    }

    private static Context context(String principal, String host) throws Exception {
        String[] parts = principal.split(":", 2);
        return new Context(new KafkaPrincipal(parts[0], parts[1]), InetAddress.getByName(host));
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        StringBuilder out = new StringBuilder();
        StandardAuthorizer authorizer = null;
        for (String line; (line = in.readLine()) != null; ) {
            String[] field = line.split("\t", -1);
            AuthorizationResult result;
            switch (field[0]) {
                case "world" -> {
                    Map<String, Object> config = new HashMap<>();
                    config.put("super.users", field[1]);
                    config.put("allow.everyone.if.no.acl.found", field[2]);
                    config.put("node.id", "1");
                    authorizer = new StandardAuthorizer();
                    authorizer.configure(config);
                    authorizer.withPluginMetrics(new PluginMetricsImpl(new Metrics(), Map.of()));
                    authorizer.completeInitialLoad();
                    continue;
                }
                case "acl" -> {
                    authorizer.addAcl(Uuid.randomUuid(), new StandardAcl(
                            ResourceType.fromCode(Byte.parseByte(field[1])), field[3],
                            PatternType.fromCode(Byte.parseByte(field[2])), field[4], field[5],
                            AclOperation.fromCode(Byte.parseByte(field[6])),
                            AclPermissionType.fromCode(Byte.parseByte(field[7]))));
                    continue;
                }
                case "ask" -> {
                    Action action = new Action(AclOperation.fromCode(Byte.parseByte(field[3])),
                            new ResourcePattern(ResourceType.fromCode(Byte.parseByte(field[4])), field[5],
                                    PatternType.LITERAL), 1, false, false);
                    result = authorizer.authorize(context(field[1], field[2]), List.of(action)).get(0);
                }
                case "any" -> result = authorizer.authorizeByResourceType(context(field[1], field[2]),
                        AclOperation.fromCode(Byte.parseByte(field[3])),
                        ResourceType.fromCode(Byte.parseByte(field[4])));
                default -> throw new IllegalArgumentException(line);
            }
            out.append(result == AuthorizationResult.ALLOWED ? '1' : '0');
        }
        System.out.println(out);
    }
}
